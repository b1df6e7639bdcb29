"""The list of versions, on a site that mike deploys. A site that is read from a folder has none to load."""

import os

from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let the theme show the versions, if mike builds the site."""
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}
    return config
