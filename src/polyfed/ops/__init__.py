"""Pure mathematics shared by the methods."""
