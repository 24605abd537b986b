"""DFlash drafters (arXiv 2602.06036)."""
