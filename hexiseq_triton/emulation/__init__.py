"""Slow ranks, small memories and slow links where all are fast and large, labelled as such."""
