"""Ranks with other hash seeds: for which programs, and what the report says of them."""

import pytest

from tests.rehearse.corpus_programs import FOLDER
from unicomm.rehearse.hash_seeds import with_other_seeds
from unicomm.rehearse.rehearsal import rehearse

PROGRAM = FOLDER / "ddp_metrics_in_the_order_of_a_set.py"


@pytest.mark.parametrize("real", [True, False])
def test_the_order_of_a_set_differs(real):
    done = rehearse(PROGRAM, 6, real_values=real)
    main = done.report.main
    assert {*main.culprits} <= {4, 5}
    assert "ranks 4, 5 had other hash seeds" in main.evidence[-1]
    assert main.next_steps[0].startswith("see whether the order of a set")


def test_one_seed_for_all_ranks(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert rehearse(PROGRAM, 4).good


@pytest.mark.parametrize(
    ("text", "own", "ranks"),
    [
        ("for x in {'a', 'b'}: pass", "", [6, 7]),
        ("import own", "names = frozenset('ab')", [6, 7]),
        ("from own import owner", "def owner(name, n): return hash(name) % n", [6, 7]),
        ("import own", "names = {'a': 1}", []),
        ("import torch", "names = {'a'}", []),
        ("this is no Python", "", []),
    ],
)
def test_for_programs_with_sets_or_hashes(tmp_path, text, own, ranks):
    program = tmp_path / "program.py"
    program.write_text(text)
    (tmp_path / "own.py").write_text(own)
    assert list(with_other_seeds(str(program), range(8))) == ranks


def test_relative_import_that_leads_out_of_all_folders(tmp_path, monkeypatch):
    text = (
        f"try:\n    from ..a import b\n    from {200 * '.'}c import d\nexcept ImportError:\n    pass\n{{1}}"
    )
    (tmp_path / "program.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert list(with_other_seeds("program.py", range(8))) == [6, 7]


def test_the_first_rank_is_always_a_forked_one(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("names = {'a', 'b'}")
    assert list(with_other_seeds(str(program), [0])) == []
    assert list(with_other_seeds(str(program), [0, 3])) == [3]
    assert list(with_other_seeds(lambda: None, [0, 3])) == []
