"""Pictures in SVG that notebooks show by themselves: in the colours of the page around them, and without another library."""
