"""The claims of the papers, tried on the reasoning model that ships here."""
