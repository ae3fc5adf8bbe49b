"""How long the first step takes with and without tf_echo, on unrolled attention decoders of growing
length.

    python benchmarks/echo_trace_time.py

The time runs from the call of `fit` to the end of the first step: tracing, planning, rewriting, one
step.
"""

import argparse
import sys

import harness

LENGTHS = (20, 80, 160)
"""Decoder steps, of about 87 forward ops each."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--child", nargs=2, metavar=("LENGTH", "POLICY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        import workloads

        length, policy = int(args.child[0]), args.child[1]
        harness.report_child(
            harness.train(workloads.attention_decoder(length), policy, told_batch=False)
        )
        return
    rows = []
    for length in LENGTHS:
        print(f"running {length} steps ...", file=sys.stderr, flush=True)
        base = harness.run_child(__file__, [str(length), "plain"])
        echo = harness.run_child(__file__, [str(length), "echo"])
        rows.append(
            [
                str(base.forward_ops),
                f"{base.first_step_seconds:.1f} s",
                f"{echo.first_step_seconds:.1f} s",
                harness.ratio(echo.first_step_seconds, base.first_step_seconds),
                f"{echo.plan_seconds:.2f} s",
            ]
        )
    header = [
        "forward ops",
        "first step, plain",
        "first step, echo",
        "ratio",
        "planning, all traces",
    ]
    print(harness.table(header, rows))


if __name__ == "__main__":
    main()
