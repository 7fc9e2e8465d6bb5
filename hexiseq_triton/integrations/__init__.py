"""Drop-ins for other libraries. Each module imports its library; nothing else here does."""
