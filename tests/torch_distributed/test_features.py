"""torch.distributed, feature by feature, with the switch on and by the name "unicomm"."""

import feature_page
import pytest

# Where its own switch is on.
TORCH_REFUSES = {"new_group_without_the_others"}


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("contender", [name for name in feature_page.CONTENDERS if name != "stock Gloo"])
def test_features(contender):
    """What runs is what docs/torch-features.md says; with the switch that is everything."""
    said, errors = feature_page.results(contender)
    assert feature_page.column(said) == feature_page.written()[contender], [r["results"] for r in said]
    assert {rank["group"] for rank in said} == {"UnicommProcessGroup"}
    if contender.startswith("switch"):
        failed = {name for rank in said for name, text in rank["results"].items() if text != "ok"}
        assert failed == TORCH_REFUSES
        assert f"now is unicomm '{contender.split()[1]}'" in errors


def test_the_page_lists_what_is_run():
    features = next(iter(feature_page.written().values()))
    assert len(features) >= 38
    assert feature_page.page(feature_page.written()) == feature_page.PAGE.read_text(), "run `make docs`"
