"""Drop-ins for other libraries. A module imports at most its own library."""
