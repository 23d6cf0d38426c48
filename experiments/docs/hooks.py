"""What the pages take from the library while they are built: the tables of the policies."""

from dms_jax.command_line import policy_options

MARK = "<!-- policies -->"


def on_page_markdown(markdown: str, **_) -> str:
    """Puts the tables in the place of their mark (called by mkdocs)."""
    return markdown.replace(MARK, policy_options.markdown())
