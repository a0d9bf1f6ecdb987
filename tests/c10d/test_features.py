"""torch.distributed, feature by feature, with the switch on and by the name "unicomm"."""

import pytest
import torch

from tests.c10d import feature_page

# With the switch on, up to 2.13. In 2.11 a split asks for the communicator for GPUs if torch has CUDA.
TORCH_REFUSES = {"new_group_without_the_others"}
if torch.__version__.startswith("2.11."):
    TORCH_REFUSES.add("split_group")
# By torchrun, as users start them: with the switch, and without it by name. The others run in forked ranks.
STARTED = ("switch, shm", '"unicomm"')


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("contender", [name for name in feature_page.CONTENDERS if name != "stock Gloo"])
def test_features(forked_programs, contender):
    """The features that run are those of docs/torch-features.md; with the switch, all of them.

    The page was written with torch 2.13. With another version no fewer run.
    """
    said, errors = feature_page.results(contender, None if contender in STARTED else forked_programs)
    runs, page = feature_page.column(said), feature_page.written()[contender]
    if not torch.__version__.startswith("2.13."):
        runs, page = (
            {n: cell for n, cell in of.items() if page[n] == "yes" and n not in TORCH_REFUSES}
            for of in (runs, page)
        )
    assert runs == page, [r["results"] for r in said]
    assert {rank["group"] for rank in said} == {"UnicommProcessGroup"}
    if contender.startswith("switch"):
        failed = {name for rank in said for name, text in rank["results"].items() if text != "ok"}
        assert failed <= TORCH_REFUSES
        assert f"now is unicomm '{contender.split()[1]}'" in errors


def test_the_page_lists_what_is_run():
    features = next(iter(feature_page.written().values()))
    assert len(features) >= 38
    assert feature_page.page(feature_page.written()) == feature_page.PAGE.read_text(), "run `make docs`"
