"""Peak memory of many small models without and with tf_echo, as measured and as predicted.

    python benchmarks/echo_zoo.py                  # all models of zoo.py
    python benchmarks/echo_zoo.py unet gpt         # some
    python benchmarks/echo_zoo.py unet --what 10   # and what the predicted peaks are made of

Each run has a process of its own (see harness.py); as no times are shown, two run at once. Peaks
are medians over the steps, in MiB, weights included. The allocator hands out chunks up to twice as
large as what it is asked for; "asked" is the peak without that, of which the prediction's error is.
Losses are those at the end of a run, compared with policy `none`. What fails is listed with its
error.
"""

import argparse
import dataclasses
import math
import sys
import warnings
from concurrent import futures

import harness

POLICIES = ("none", "echo")
STEPS = 6
"""Enough for a median; losses have no time to drift apart by rounding."""
WRONG = 0.1
"""The relative error from which a prediction is counted as off."""
SMALL_BYTES = 20 * 2**20
"""Peaks below are mostly what TensorFlow and Keras hold, and are not counted."""

Results = dict[str, dict[str, harness.Result]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="which models (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes at once")
    parser.add_argument(
        "--what", type=int, default=0, metavar="N", help="list the N largest parts of each peak"
    )
    parser.add_argument("--json", help="also write the results here")
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "POLICY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_one(args)
        return
    import zoo

    names = args.models or list(zoo.ZOO)
    unknown = [name for name in names if name not in zoo.ZOO]
    if unknown:
        parser.error(f"unknown model {unknown[0]!r}; there are {', '.join(zoo.ZOO)}")
    results: Results = {name: {} for name in names}
    failures: dict[str, str] = {}
    with futures.ThreadPoolExecutor(args.jobs) as pool:
        runs = {
            pool.submit(measure, name, policy, args.what): (name, policy)
            for name in names
            for policy in POLICIES
        }
        for run in futures.as_completed(runs):
            (name, policy), failed = runs[run], ""
            try:
                results[name][policy] = run.result()
            except harness.ChildError as error:
                failures[f"{name}, {policy}"] = failed = error.reason
            print(f"{name}, policy {policy}: {failed or 'done'}", file=sys.stderr, flush=True)
            harness.write_json(args.json, results)
    show(results, failures)


def run_one(args: argparse.Namespace) -> None:
    import zoo

    import tf_echo

    # A step that could not be planned would only warn, and then train as it is.
    warnings.simplefilter("error", tf_echo.EchoWarning)
    name, policy = args.child
    workload = dataclasses.replace(zoo.ZOO[name](), steps=STEPS)
    harness.report_child(harness.train(workload, policy, largest=args.what))


def measure(name: str, policy: str, what: int = 0) -> harness.Result:
    """One run of a model in a process of its own."""
    return harness.run_child(__file__, [name, policy, "--what", str(what)])


def rise(none: harness.Result, echo: harness.Result) -> float:
    """By how much more Echo asks for at its peak, beyond what the steps of a run differ by."""
    spread = max(none.spread, echo.spread)
    return max(echo.requested_bytes / none.requested_bytes - 1.0 - spread, 0.0)


def loss_difference(none: harness.Result, echo: harness.Result) -> float:
    """Of the last losses, relative; infinite where one of them is no number."""
    difference = abs(echo.loss - none.loss) / max(abs(none.loss), 1e-30)
    return difference if math.isfinite(difference) else math.inf


def show(results: Results, failures: dict[str, str]) -> None:
    whole = {name: (r["none"], r["echo"]) for name, r in results.items() if len(r) == 2}
    header = "model none asked predicted error echo asked predicted error".split()
    header += ["ratio", "spread", "losses"]
    print(harness.table(header, [row(name, *both) for name, both in whole.items()]))
    above = [name for name, both in whole.items() if rise(*both)]
    off = [
        f"{name} ({policy} {100 * result.prediction_error:+.0f}%)"
        for name, by_policy in results.items()
        for policy, result in by_policy.items()
        if result.peak_bytes > SMALL_BYTES and abs(result.prediction_error) > WRONG
    ]
    print(
        f"{len(whole)} models; {len(above)} above the baseline beyond the spread: {above}; "
        f"{len(off)} predictions off by more than {WRONG:.0%}: {', '.join(off)}"
    )
    for run, reason in failures.items():
        print(f"{run} fails: {reason}")
    for name, by_policy in results.items():
        for policy, result in by_policy.items():
            if result.largest:
                print("\n    ".join([f"{name}, {policy}, at the peak:", *result.largest]))


def row(name: str, none: harness.Result, echo: harness.Result) -> list[str]:
    columns = [name]
    for result in (none, echo):
        sizes = (result.peak_bytes, result.requested_bytes, result.predicted_bytes)
        columns += [_mib(size) for size in sizes]
        columns.append(f"{100 * result.prediction_error:+.0f}%")
    columns.append(harness.ratio(none.peak_bytes, echo.peak_bytes))
    columns.append(f"{100 * max(none.spread, echo.spread):.1f}%")
    difference = loss_difference(none, echo)
    return [*columns, f"{difference:.0e}" if difference else "equal"]


def _mib(count: float) -> str:
    return f"{count / 2**20:,.1f}"


if __name__ == "__main__":
    main()
