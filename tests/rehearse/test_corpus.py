"""The corpus of programs: a part in each run of the suite, all of them by `make rehearsals`."""

import pytest

from tests.rehearse.corpus_conductor import REAL
from tests.rehearse.corpus_programs import programs, rehearsed, wrong

pytestmark = pytest.mark.processes
RANKS = 8
PROGRAMS = {program.name: program for program in programs()}
#: Programs that showed a defect of the rehearsal or the analyzer, and one or two of each kind.
CHOSEN = [
    *("async_hooks_in_another_order", "dcp_load_where_there_is_a_file", "ddp_uneven_batches"),
    *("ddp_unused_head", "fsdp_full_state_on_rank_zero", "good_async_prefetch", "good_dcp", "good_ddp_join"),
    *("good_functional", "good_groups", "good_messages_from_any_rank", "good_messages_tags"),
    *(
        "moe_capacity_of_one_rank",
        "good_moe_counts_exchanged",
        "good_moe_counts_exchanged_real",
        "good_objects",
    ),
    *("good_own_communicators", "good_padded_gather_real", "good_pp_interleaved", "good_three_dimensions"),
    *("groups_other_members", "groups_rows_and_columns", "messages_any_then_one", "messages_crossed_tags"),
    *("messages_other_tag", "messages_wrong_neighbour", "moe_counts_not_exchanged"),
    *("fsdp_evaluation_between_steps", "groups_server_asks_once_more", "ddp_warm_up_on_one_rank"),
    *("tp_debug_reduction", "groups_double_from_a_branch", "good_groups_server_and_workers"),
    *("pp_1f1b_with_blocking_sends", "pp_torch_schedule_other_count", "tp_gather_before_reduce"),
]


@pytest.mark.parametrize("name", CHOSEN)
def test_a_rehearsal_says_what_the_header_expects(name):
    assert wrong(PROGRAMS[name], rehearsed(PROGRAMS[name], RANKS), RANKS) == ""


def test_the_corpus_is_whole():
    good = [program for program in PROGRAMS.values() if program.good]
    assert min(len(good), len(PROGRAMS) - len(good)) >= 40
    assert all(program.lines for program in PROGRAMS.values() if not program.good)
    assert len({program.sentence for program in PROGRAMS.values()}) == len(PROGRAMS)
    assert len([name for name in REAL if not PROGRAMS[name].good]) >= 10


def test_another_verdict_or_line_counts_as_wrong():
    done = rehearsed(PROGRAMS["objects_gathered_by_one"], RANKS)
    assert wrong(PROGRAMS["objects_gathered_by_one"], done, RANKS) == ""
    assert "wrong-operation" in wrong(PROGRAMS["good_objects"], done, RANKS)
    assert "the line is" in wrong(PROGRAMS["ddp_uneven_batches"], done, RANKS)
