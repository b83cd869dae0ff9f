"""UR2: two stages of rewards, tasks that are shown without the search tool, and summaries of what is found."""
