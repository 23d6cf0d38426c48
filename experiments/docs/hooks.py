"""What the pages take from the library while they are built: the policies that there are."""

from dms_jax.command_line import policy_options
from dms_jax.policies import POLICIES

TABLES, CLASSES = "<!-- policies -->", "<!-- classes -->"


def on_page_markdown(markdown: str, **_) -> str:
    """Puts tables and classes in the places of their marks (called by mkdocs)."""
    classes = "\n\n".join(f"::: dms_jax.policies.{name}" for name in POLICIES)
    return markdown.replace(TABLES, policy_options.markdown()).replace(CLASSES, classes)
