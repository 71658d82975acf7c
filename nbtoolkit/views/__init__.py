"""What a folder of runs says now, and views of it as HTML and text; read by cells and panels."""
