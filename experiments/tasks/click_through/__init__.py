"""Whether somebody clicks, from dozens of id fields, some with tables of ten million rows."""
