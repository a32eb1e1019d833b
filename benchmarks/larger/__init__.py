"""Tables larger than memory: holdfast's log store beside DRAM, mapped files and RocksDB; see ../README.md."""
