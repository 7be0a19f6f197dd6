"""What opens over the board at a key: each panel is lines of text made from a snapshot."""
