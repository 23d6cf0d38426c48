"""Fills the pages with the library's policies and models when they are built."""

from dms_jax.command_line import policy_options, shapes
from dms_jax.policies import POLICIES

TABLES, CLASSES = "<!-- policies -->", "<!-- classes -->"
MODELS, CACHES = "<!-- models -->", "<!-- caches -->"


def on_page_markdown(markdown: str, **_) -> str:
    """Replaces marks by tables and classes (called by mkdocs)."""
    classes = "\n\n".join(f"::: dms_jax.policies.{name}" for name in POLICIES)
    for mark, table in ((MODELS, shapes.model_table), (CACHES, shapes.cache_table)):
        markdown = markdown.replace(mark, table()) if mark in markdown else markdown
    return markdown.replace(TABLES, policy_options.markdown()).replace(CLASSES, classes)
