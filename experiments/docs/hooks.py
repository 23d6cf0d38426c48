"""What the pages take from the library while they are built: the policies and models there are."""

from dms_jax.command_line import policy_options, shapes
from dms_jax.policies import POLICIES

TABLES, CLASSES = "<!-- policies -->", "<!-- classes -->"
MODELS, CACHES = "<!-- models -->", "<!-- caches -->"


def on_page_markdown(markdown: str, **_) -> str:
    """Puts tables and classes in the places of their marks (called by mkdocs)."""
    classes = "\n\n".join(f"::: dms_jax.policies.{name}" for name in POLICIES)
    for mark, table in ((MODELS, shapes.model_table), (CACHES, shapes.cache_table)):
        markdown = markdown.replace(mark, table()) if mark in markdown else markdown
    return markdown.replace(TABLES, policy_options.markdown()).replace(CLASSES, classes)
