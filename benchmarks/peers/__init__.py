"""One small runner a peer, each run by its own Python."""
