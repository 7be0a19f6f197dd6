"""One run on several nodes: how their ddpdoctors find each other, and what they exchange."""
