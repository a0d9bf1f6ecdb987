"""torch.distributed, feature by feature, on stock Gloo, with the switch on, and by the name "unicomm"."""

import feature_page
import pytest

TORCH_REFUSES = {"new_group_without_the_others"}  # where its own switch is on


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("contender", feature_page.CONTENDERS)
def test_features(contender):
    """What runs is what docs/torch-features.md says; with the switch that is everything."""
    said, errors = feature_page.results(contender)
    written = feature_page.written()[contender]
    for rank in said:
        cells = {name: feature_page.cell(text) for name, text in rank["results"].items()}
        assert cells == written, rank["results"]
        stock = contender == "stock Gloo"
        assert rank["group"] == ("ProcessGroup" if stock else "UnicommProcessGroup")
        if contender.startswith("switch"):
            assert {name for name, text in rank["results"].items() if text != "ok"} == TORCH_REFUSES
    if contender.startswith("switch"):
        assert f"now is unicomm '{contender.split()[1]}'" in errors


def test_the_page_lists_what_is_run():
    features = next(iter(feature_page.written().values()))
    assert len(features) >= 38
    assert feature_page.page(feature_page.written()) == feature_page.PAGE.read_text(), "run `make docs`"
