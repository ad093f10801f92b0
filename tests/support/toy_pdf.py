"""PDF files written by hand: pages of lines in Helvetica, without a table of the objects."""

from collections.abc import Sequence


def pdf_of(*pages: str | Sequence[str], field: str = "") -> bytes:
    """Return a PDF of these pages, each a line or several; the first may have a form."""
    listed = [[page] if isinstance(page, str) else list(page) for page in pages]
    kids = b" ".join(b"%d 0 R" % (4 + 2 * i) for i in range(len(listed)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(listed)),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, lines in enumerate(listed):
        text = " 0 -20 Td ".join(f"({line}) Tj" for line in lines)
        stream = f"BT /F1 12 Tf 40 700 Td {text} ET".encode("latin-1")
        objects += [
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % (5 + 2 * number),
            b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        ]
    if field:
        widget, look = len(objects) + 1, f"BT /F1 12 Tf ({field}) Tj ET".encode("latin-1")
        fields = b"%d 0 R %d 0 R" % (widget, widget + 2)
        objects[0] = objects[0].replace(b">>", b"/AcroForm << /Fields [%s] >> >>" % fields)
        notes = b"/Annots [%s << /Subtype /Text >>] /Parent" % fields
        objects[3] = objects[3].replace(b"/Parent", notes)
        objects += [
            b"<< /Subtype /Widget /FT /Tx /T (n) /Rect [40 600 200 620] /AP << /N %d 0 R >> >>"
            % (widget + 1),
            b"<< /Subtype /Form /BBox [0 0 160 20] /Resources << /Font << /F1 3 0 R >> >> "
            b"/Length %d >>\nstream\n%s\nendstream" % (len(look), look),
            b"<< /Subtype /Widget /FT /Btn /T (b) /Rect [0 0 9 9] >>",
        ]
    bodies = b"".join(b"%d 0 obj\n%s\nendobj\n" % pair for pair in enumerate(objects, 1))
    return b"%PDF-1.4\n" + bodies + b"trailer << /Root 1 0 R >>\n%%EOF"
