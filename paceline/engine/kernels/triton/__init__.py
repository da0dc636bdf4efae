"""The engine's work on a GPU, in Triton. Only what is to run there imports these modules: without triton there is nothing here."""
