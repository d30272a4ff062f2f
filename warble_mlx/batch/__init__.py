"""Many texts into many files: rows of a JSONL file, spoken side by side.

IN.jsonl ──rows──► checked rows ──shares──► this process's rows ──run──► OUT/ID.wav
                                                                └─► ledger: manifest, failures
"""
