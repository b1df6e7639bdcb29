"""docs/hosts.md is generated from the tables that are tried on the hosts."""

from pathlib import Path

import pytest
from hosts import HOSTS, page


def test_the_page_on_hosts_is_generated():
    """PYTHONPATH=tests/integrations python -c "from hosts import page; print(page(), end='')" prints it."""
    for host in HOSTS:
        pytest.importorskip(host)
    assert (Path(__file__).parents[2] / "docs" / "hosts.md").read_text() == page()
