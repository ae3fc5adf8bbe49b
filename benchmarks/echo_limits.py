"""How much larger a batch or a model trains in the same memory under tf_echo (Echo's Table II).

    python benchmarks/echo_limits.py                # all
    python benchmarks/echo_limits.py nmt-batch      # one

TensorFlow's allocator is given a fixed budget. Of the sizes that are tried, the largest with which
two steps of training end without an out-of-memory error is found by bisection; each trial has a
process of its own, and both policies are searched side by side, for a process that runs out of
memory mostly waits (the allocator retries for 10 s). Sizes in between are not tried: a limit is
exact to a step of `SEARCHES`.
"""

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from concurrent import futures

import harness
import workloads

POLICIES = ("none", "echo")
_STEPS = 2
_OUT_OF_MEMORY = re.compile(r"ResourceExhausted|RESOURCE_EXHAUSTED|OOM when allocating|bad_alloc")


@dataclasses.dataclass(frozen=True)
class Search:
    """What is made larger, and the memory that it must fit in."""

    title: str
    workload: Callable[[int], workloads.Workload]
    sizes: Sequence[int]
    """What may be tried, in rising order."""
    budget_mib: int


SEARCHES: dict[str, Search] = {
    "nmt-batch": Search(
        "NMT, LSTM + attention loop, 64 steps, vocabulary 2000: batch",
        lambda batch: workloads.nmt(2000, batch),
        range(8, 8 * 49, 8),
        512,
    ),
    "transformer-depth": Search(
        "Transformer, batch 8 x 128: layers",
        lambda depth: workloads.transformer("relu", 8, 128, depth=depth),
        range(1, 33),
        256,
    ),
    "resnet-depth": Search(
        "ResNet, batch 32, 32 x 32: residual blocks",
        lambda depth: workloads.residual_net(depth),
        range(1, 49),
        256,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("searches", nargs="*", help=f"of {', '.join(SEARCHES)} (default: all)")
    parser.add_argument(
        "--child", nargs=3, metavar=("SEARCH", "SIZE", "POLICY"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.child:
        run_one(*args.child)
        return
    names = args.searches or list(SEARCHES)
    unknown = [name for name in names if name not in SEARCHES]
    if unknown:
        parser.error(f"unknown search {unknown[0]!r}; there are {', '.join(SEARCHES)}")
    rows = []
    for name in names:
        search = SEARCHES[name]
        with futures.ThreadPoolExecutor(len(POLICIES)) as pool:
            none, echo = pool.map(largest, [name] * len(POLICIES), POLICIES)
        ratio = harness.ratio(echo, none) if none else ""
        rows.append([search.title, f"{search.budget_mib} MiB", str(none), str(echo), ratio])
    print(harness.table(["largest that trains", "budget", *POLICIES, "ratio"], rows))


def run_one(name: str, size: str, policy: str) -> None:
    workload = SEARCHES[name].workload(int(size))
    harness.report_child(harness.train(dataclasses.replace(workload, steps=_STEPS), policy))


def largest(name: str, policy: str) -> int:
    """The largest size that fits, 0 if none does."""
    sizes = SEARCHES[name].sizes
    low, high = -1, len(sizes)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(name, sizes[middle], policy):
            low = middle
        else:
            high = middle
    if high == len(sizes):
        raise ValueError(f"The largest size of {name!r} fits. Give it a smaller budget.")
    return sizes[low] if low >= 0 else 0


def fits(name: str, size: int, policy: str) -> bool:
    """Whether a size trains; whatever fails otherwise than for lack of memory is an error."""
    budget = {"TF_CPU_BFC_MEM_LIMIT_IN_MB": str(SEARCHES[name].budget_mib)}
    outcome = "trains"
    try:
        harness.run_child(__file__, [name, str(size), policy], environment=budget)
    except harness.ChildError as error:
        if not _OUT_OF_MEMORY.search(error.stderr):
            raise
        outcome = "out of memory"
    print(f"{name}, {size}, policy {policy}: {outcome}", file=sys.stderr, flush=True)
    return outcome == "trains"


if __name__ == "__main__":
    main()
