"""FAQ fetch/skip: before each query of a chat the policy says whether the bot fetches a passage."""
