"""The second driver of the core: a virtual clock and a modelled world."""
