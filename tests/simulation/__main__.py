"""`make simulate`: runs histories by their seeds, and tells how those went wrong that did."""

import argparse
import os
import sys
from pathlib import Path

from tests.simulation import ladder
from tests.simulation.campaign import many
from tests.simulation.history import History
from tests.simulation.oracle import complaints
from tests.simulation.plan import Plan, draw, of_text, to_text
from tests.simulation.shrink import kind_of, shrunk


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="tell one history, as small as it can be made")
    parser.add_argument("--seeds", default="0:1000", help="run many, FIRST:END")
    parser.add_argument("--story", type=Path, help="tell the history of a file in stories/")
    parser.add_argument("--keep", type=Path, help="write the small history to this file in stories/")
    parser.add_argument("--whole", action="store_true", help="with --seed: do not make it smaller")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.story is not None:
        return tell(of_text(args.story.read_text()))
    if args.seed is not None:
        return one(args.seed, args.keep, whole=args.whole)
    first, _, end = args.seeds.partition(":")
    return many(int(first), int(end), args.processes)


def one(seed: int, keep: Path | None, *, whole: bool) -> int:
    """Tell one history."""
    plan = draw(seed)
    kinds = {kind_of(each) for each in complaints(History(plan).run())}
    if kinds and not whole:
        plan = shrunk(plan, kinds, lambda what: print(f"shrunk to {what}", file=sys.stderr))
    if keep is not None:
        keep.write_text(to_text(plan))
    return tell(plan)


def tell(plan: Plan) -> int:
    """Print a history as a ladder, and what is wrong with it."""
    history = History(plan)
    story, outcome = ladder.watch(history), history.run()
    found = complaints(outcome)
    print(to_text(plan))
    print("\n".join(ladder.lines(outcome, story)))
    print("\n".join(["", *(f"!! {each}" for each in found)]) if found else "\nNothing is wrong.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
