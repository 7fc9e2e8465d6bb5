"""What the ranks' steps consisted of: watch, record, compare with the prediction, show."""
