"""Some faults of the campaign of ``make faults``: no survivor hangs, and their errors name the rank that is lost."""

from tests.faults.campaign import KINDS, MOMENTS, draw, line, possible, run_all, summary
from tests.support.worlds import run_world, shown

SEED = 22


def test_survivors_of_faults_end_and_name_the_victim() -> None:
    cases = draw(range(40), seed=SEED)
    assert {case.kind for case in cases} == set(KINDS) and {case.moment for case in cases} == set(MOMENTS)
    outcomes = list(run_all(list(possible(cases)), jobs=4))
    shown.setdefault("faults: what became of the survivors", []).extend(map(line, outcomes))
    bad = [[line(each), *(f"{error.rank}: {error.text}" for error in each.errors)] for each in outcomes if each.bad]
    assert not bad, "\n".join(summary(outcomes))
    told = [all(error.tells(outcome.case.victim)) for outcome in outcomes for error in outcome.errors]
    assert sum(told) >= 0.9 * len(told), summary(outcomes)[-1]


def test_mishaps_lose_nothing_and_run_nothing() -> None:
    result = run_world("python", 1, ["-m", "tests.faults.mishaps", "-n", "9", "--seed", str(SEED)])
    assert result.returncode == 0, result.output
    shown.setdefault("mishaps of checkpoints", []).append(result.output.splitlines()[-1])
