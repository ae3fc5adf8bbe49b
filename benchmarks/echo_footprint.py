"""How much less memory a train step needs under tf_echo, and what that costs in time.

    python benchmarks/echo_footprint.py                     # all models
    python benchmarks/echo_footprint.py mlp resnet50        # some

Each run has a process of its own (see harness.py). Peaks are medians over the steps, in MiB,
weights included; the spread is that of the steps of one run; ratios compare two runs of this
command.
"""

import argparse
import sys

import harness

POLICIES = ("none", "echo")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", help="which models (default: all)")
    parser.add_argument("--optimizer", default="sgd", help="the inner optimizer")
    parser.add_argument(
        "--open-batch", action="store_true", help="data that leave the batch size open"
    )
    parser.add_argument("--json", help="also write the results here")
    parser.add_argument("--child", nargs=2, metavar=("WORKLOAD", "POLICY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_one(args)
        return
    import workloads

    names = args.workloads or list(workloads.FOOTPRINT)
    unknown = [name for name in names if name not in workloads.FOOTPRINT]
    if unknown:
        parser.error(f"unknown workload {unknown[0]!r}; there are {', '.join(workloads.FOOTPRINT)}")
    results: dict[str, dict[str, harness.Result]] = {}
    for name in names:
        results[workloads.FOOTPRINT[name]().name] = {
            policy: measure(name, policy, args) for policy in POLICIES
        }
    show(results)
    harness.write_json(args.json, results)


def run_one(args: argparse.Namespace) -> None:
    import workloads

    name, policy = args.child
    workload = workloads.FOOTPRINT[name]()
    harness.report_child(harness.train(workload, policy, args.optimizer, not args.open_batch))


def measure(name: str, policy: str, args: argparse.Namespace) -> harness.Result:
    options = ["--optimizer", args.optimizer] + (["--open-batch"] if args.open_batch else [])
    print(f"running {name}, policy {policy} ...", file=sys.stderr, flush=True)
    return harness.run_child(__file__, [name, policy, *options])


def show(results: dict[str, dict[str, harness.Result]]) -> None:
    header = [
        "model",
        "policy",
        "peak",
        "spread",
        "predicted",
        "error",
        "less memory",
        "step",
        "step time",
        "first step",
    ]
    rows = []
    for name, by_policy in results.items():
        base = by_policy["none"]
        for policy, result in by_policy.items():
            rows.append(
                [
                    name if policy == "none" else "",
                    policy,
                    harness.mib(result.peak_bytes),
                    f"{100 * result.spread:.1f}%",
                    harness.mib(result.predicted_bytes),
                    f"{100 * (result.predicted_bytes / result.peak_bytes - 1):+.0f}%",
                    harness.ratio(base.peak_bytes, result.peak_bytes),
                    f"{result.step_seconds:.2f} s",
                    harness.ratio(result.step_seconds, base.step_seconds),
                    harness.ratio(result.first_step_seconds, base.first_step_seconds),
                ]
            )
    print(harness.table(header, rows))
    for name, by_policy in results.items():
        losses = {result.loss for result in by_policy.values()}
        print(f"{name}: losses {'equal' if len(losses) == 1 else sorted(losses)}")


if __name__ == "__main__":
    main()
