"""Parts of ./bench messaging."""
