"""Names, signatures and defaults of unicomm.torchcomms are those of the specification and the docs."""

import dataclasses
import inspect
import re
from datetime import timedelta

import pytest

from tests import ROOT
from tests.torchcomms import names_page
from tests.torchcomms.names import ADDED, NAMES, VARIABLES
from unicomm import torchcomms

ROWS = [row for rows in NAMES.values() for row in rows]
HERE = [row for row in ROWS if row.here]


def found(path):
    value = torchcomms
    for part in path.split("."):
        fields = {f.name: f for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else {}
        value = fields[part] if part in fields and not hasattr(value, part) else getattr(value, part)
    return value


def shown(value):
    return "datetime.timedelta(seconds=600)" if value == timedelta(seconds=600) else repr(value)


def text(parameter):
    """A parameter as the specification writes it. All may be passed by position and by name."""
    assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD, parameter
    default = parameter.default
    if default is parameter.empty:
        return parameter.name
    if type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
        default = [] if "Sequence" in str(parameter.annotation) or "list" in str(parameter.annotation) else {}
    return f"{parameter.name}={shown(default)}"


@pytest.mark.parametrize("row", [row for row in HERE if row.signature], ids=lambda row: row.path)
def test_signature(row):
    called = found(row.path)
    parameters = list(inspect.signature(called).parameters.values())
    if parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    ours = [text(parameter) for parameter in parameters]
    assert f"({', '.join(ours)})" == row.signature.replace("\n", "")


@pytest.mark.parametrize("row", [row for row in HERE if not row.signature], ids=lambda row: row.path)
def test_name(row):
    if row.path == "BatchSendRecv.ops":  # of its objects
        assert torchcomms.BatchSendRecv(None).ops == []
    else:
        found(row.path)


@pytest.mark.parametrize("row", [row for row in ROWS if not row.here], ids=lambda row: row.path)
def test_missing_name(row):
    with pytest.raises(AttributeError):
        found(row.path)


def test_no_public_name_is_undocumented():
    tops = {row.path.split(".")[0] for row in HERE}
    assert set(torchcomms.__all__) - ADDED <= tops
    for name in ("hooks", "objcol", "device_mesh"):
        module = getattr(torchcomms, name)
        listed = {row.path.split(".")[1] for row in HERE if row.path.startswith(f"{name}.")}
        own = {
            key
            for key, value in vars(module).items()
            if not key.startswith("_")
            and getattr(value, "__module__", "").startswith("unicomm")
            and (inspect.isfunction(value) or (inspect.isclass(value) and name == "hooks"))
            and (name == "hooks" or value.__module__ == module.__name__)
        }
        assert own <= listed, own - listed


def test_no_name_is_listed_twice():
    paths = [row.path for row in ROWS]
    assert len(paths) == len(set(paths))


def test_variables_that_are_honoured_are_read():
    """A variable is in the source if and only if the table says that it has an effect."""
    source = "".join(path.read_text() for path in (ROOT / "unicomm").rglob("*.py"))
    for names, how in VARIABLES.items():
        for name in names.split(", "):
            read = re.search(rf'"{re.escape(name)}', source) is not None
            assert read != how.startswith("not read"), name


def test_the_page_is_current():
    page = names_page.PAGE.read_text()
    assert names_page.renewed(page) == page, "make docs"


def test_defaults_of_options():
    options = torchcomms.CommOptions()
    assert options.timeout == timedelta(seconds=600)
    assert options.abort_process_on_timeout_or_error is True
    assert torchcomms.BatchP2POptions().timeout == timedelta(0)
