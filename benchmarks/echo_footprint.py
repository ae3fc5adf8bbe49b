"""How much less memory a train step needs under tf_echo, and what that costs in time.

    python benchmarks/echo_footprint.py                     # all models
    python benchmarks/echo_footprint.py mlp resnet50        # some
    python benchmarks/echo_footprint.py --xla               # compiled
    python benchmarks/echo_footprint.py --rivals            # and what else there is (rivals.py)
    python benchmarks/echo_footprint.py --parts             # and echo without each of its parts
    python benchmarks/echo_footprint.py nmt-2000 --what 10  # and what the peak is made of
    python benchmarks/echo_footprint.py mlp --repeat 5      # medians of five runs of each policy

Each run has a process of its own (see harness.py). Peaks are medians over the steps, in MiB,
weights included; the spread is that of the steps of one run, or of several runs; ratios compare
runs of this command. TensorFlow's allocator hands out chunks up to twice as large as what it is
asked for: "asked" is the peak without that, and what a prediction's error is of. Under XLA the peak
is what the compiler allots to the step; what is predicted, and what --what lists without --xla, is
the step that is not compiled. What fails is listed with its error.
"""

import argparse
import sys

import harness

POLICIES = ("none", "mirror", "echo")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", help="which models (default: all)")
    parser.add_argument("--optimizer", default="sgd", help="the inner optimizer")
    parser.add_argument(
        "--open-batch", action="store_true", help="data that leave the batch size open"
    )
    parser.add_argument("--xla", action="store_true", help="compile the train step")
    parser.add_argument("--rivals", action="store_true", help="also measure rivals.py")
    parser.add_argument("--parts", action="store_true", help="also leave out each part of echo")
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="run all policies N times, in turns"
    )
    parser.add_argument(
        "--what", type=int, default=0, metavar="N", help="list the N largest parts of each peak"
    )
    parser.add_argument("--json", help="also write the results here")
    parser.add_argument("--child", nargs=2, metavar=("WORKLOAD", "POLICY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_one(args)
        return
    import rivals
    import workloads

    names = args.workloads or list(workloads.FOOTPRINT)
    unknown = [name for name in names if name not in workloads.FOOTPRINT]
    if unknown:
        parser.error(f"unknown workload {unknown[0]!r}; there are {', '.join(workloads.FOOTPRINT)}")
    policies = [*POLICIES, *(rivals.RIVALS if args.rivals else ())]
    if args.parts:
        from tf_echo import passes

        policies += [f"echo without {part}" for part in (*passes.TECHNIQUES, "masks,bits")]
    results: dict[str, dict[str, harness.Result]] = {}
    failures: dict[tuple[str, str], str] = {}
    for name in names:
        title = workloads.FOOTPRINT[name]().name
        runs: dict[str, list[harness.Result]] = {}
        for policy in policies * args.repeat:
            if (title, policy) in failures:
                continue
            try:
                runs.setdefault(policy, []).append(measure(name, policy, args))
            except harness.ChildError as error:
                failures[title, policy] = error.reason
                print(f"{name}, {policy}: {error.reason}", file=sys.stderr, flush=True)
        results[title] = {
            policy: harness.median(found)
            for policy, found in runs.items()
            if (title, policy) not in failures
        }
    show(results, failures)
    harness.write_json(args.json, results)


def run_one(args: argparse.Namespace) -> None:
    import workloads

    name, policy = args.child
    workload = workloads.FOOTPRINT[name]()
    told_batch = not args.open_batch
    harness.report_child(
        harness.train(workload, policy, args.optimizer, told_batch, args.xla, args.what)
    )


def measure(name: str, policy: str, args: argparse.Namespace) -> harness.Result:
    options = ["--optimizer", args.optimizer, "--what", str(args.what)]
    options += [
        f"--{flag}" for flag in ("xla", "open-batch") if getattr(args, flag.replace("-", "_"))
    ]
    print(f"running {name}, policy {policy} ...", file=sys.stderr, flush=True)
    return harness.run_child(__file__, [name, policy, *options], args.xla)


def show(
    results: dict[str, dict[str, harness.Result]], failures: dict[tuple[str, str], str]
) -> None:
    header = [
        "model",
        "policy",
        "peak",
        "spread",
        "asked",
        "predicted",
        "error",
        "less memory",
        "step",
        "step time",
        "first step",
    ]
    rows = []
    for name, by_policy in results.items():
        base = by_policy.get("none")
        failed = {policy: reason for (title, policy), reason in failures.items() if title == name}
        lines = [row(policy, result, base) for policy, result in by_policy.items()]
        lines += [[policy, "fails", *[""] * (len(header) - 3)] for policy in failed]
        rows += [[name if i == 0 else "", *line] for i, line in enumerate(lines)]
    print(harness.table(header, rows))
    for (name, policy), reason in failures.items():
        print(f"{name}: {policy} fails: {reason}")
    for name, by_policy in results.items():
        losses = {policy: result.loss for policy, result in by_policy.items()}
        print(f"{name}: losses {'equal' if len(set(losses.values())) == 1 else losses}")
    for name, by_policy in results.items():
        for policy, result in by_policy.items():
            if result.largest:
                print("\n    ".join([f"{name}, {policy}, at the peak:", *result.largest]))


def row(policy: str, result: harness.Result, base: harness.Result | None) -> list[str]:
    """All columns but the first."""
    predicted = error = less = slower = first = ""
    asked = harness.mib(result.requested_bytes) if result.requested_bytes else ""
    if result.predicted_bytes:
        predicted = harness.mib(result.predicted_bytes)
        error = f"{100 * result.prediction_error:+.0f}%"
    if base:
        less = harness.ratio(base.peak_bytes, result.peak_bytes)
        slower = harness.ratio(result.step_seconds, base.step_seconds)
        first = harness.ratio(result.first_step_seconds, base.first_step_seconds)
    return [
        policy,
        harness.mib(result.peak_bytes),
        f"{100 * result.spread:.1f}%",
        asked,
        predicted,
        error,
        less,
        f"{1000 * result.step_seconds:,.0f} ms",
        slower,
        first,
    ]


if __name__ == "__main__":
    main()
