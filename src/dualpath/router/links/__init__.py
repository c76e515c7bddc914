"""Front ends that are processes of their own: ``scheduling`` over a control connection."""
