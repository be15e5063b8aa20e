"""Process groups: the first all_reduce of a mesh, including the creation of its group."""

from __future__ import annotations

from harness import FLOOR, OURS, Measure, Options, Target, calm, race


def run(options: Options) -> list[Measure]:
    """Seconds from the call to the sum on all ranks, each for a mesh without a group."""
    return [_first(options, ranks) for ranks in ((8,) if options.quick else (8, 64, 128))]


def _first(options: Options, ranks: int) -> Measure:
    target = Target("≤ 1 s", 1.0) if ranks <= 64 else None
    measure = Measure("groups", f"first all_reduce of {ranks} ranks", "s", "less", target=target)
    with race(options, [OURS, FLOOR], measure.notes) as entered:
        entered.each("open", what="groups", ranks=ranks)
        measure.load = calm(options)
        measure.samples = entered.rounds(options.rounds(7), "run", count=1)
    measure.notes.append("floor: init_process_group over torch's TCPStore in forks of a warm process, then all_reduce")
    measure.notes.append("torch asks a name server for the name of each address; ours does not")
    return measure
