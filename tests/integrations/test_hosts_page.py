"""Every name of the installed hosts has a fate, and docs/hosts.md is generated from the tables."""

from importlib import import_module
from pathlib import Path

import pytest
from hosts import HOSTS, page


@pytest.mark.parametrize("host", HOSTS)
def test_every_name_of_the_installed_host_has_a_fate_and_a_short_reason(host: str):
    pytest.importorskip(host)
    table = import_module(f"hosts.{host}")
    new, gone = table.names() - table.FATES.keys(), table.FATES.keys() - table.names()
    assert not new, f"decide in hosts/{host}.py what becomes of {sorted(new)}: take them, or refuse them in the bridge"
    assert not gone, f"remove from hosts/{host}.py what {host} no longer has: {sorted(gone)}"
    for name, fate in table.FATES.items():
        how, _, why = fate.partition(": ")
        assert how in {"taken", "refused", "no effect by design"}, name
        assert len(why.split()) <= 12, name
        assert why or how == "taken", name


def test_the_page_on_hosts_is_generated():
    """PYTHONPATH=tests/integrations python -c "from hosts import page; print(page(), end='')" prints it."""
    for host in HOSTS:
        pytest.importorskip(host)
    assert (Path(__file__).parents[2] / "docs" / "hosts.md").read_text() == page()
