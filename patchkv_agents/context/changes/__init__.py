"""What changed between two contexts: matching messages, naming edits, anchors."""
