"""Plans and simulations as tables, plots and self-contained pages."""
