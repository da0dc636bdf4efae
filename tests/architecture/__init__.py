"""The house itself: documents that are true, floors, fresh stubs, files of a readable size."""
