"""Everything that a person reads about a run: tables, fault reports, summaries, action items."""
