"""Tables and figures of the papers as entries: what they claim, what we measured, and the verdict that follows."""
