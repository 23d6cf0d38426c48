"""Fills the pages with the library's policies when they are built."""

from dms_jax.command_line import policy_options
from dms_jax.policies import POLICIES

TABLES, CLASSES = "<!-- policies -->", "<!-- classes -->"


def on_page_markdown(markdown: str, **_) -> str:
    """Replaces marks by tables and classes (called by mkdocs)."""
    classes = "\n\n".join(f"::: dms_jax.policies.{name}" for name in POLICIES)
    return markdown.replace(TABLES, policy_options.markdown()).replace(CLASSES, classes)
