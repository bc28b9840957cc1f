"""The three nested choices: split dims within a block, blocks to stages, and the mesh."""
