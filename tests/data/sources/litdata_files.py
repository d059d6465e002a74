"""Small data sets as the package litdata writes them, so that each run compares with its own files.

Five samples in two chunks, by litdata 0.2.76 with PyTorch 2.13 and pyarrow 26: each data set by
`BinaryWriter(folder, chunk_size=3, **options)`, `writer[number] = sample_of(number)`, `writer.done(); writer.merge()`.
Images are Pillow's, "tensors" PyTorch's, and all else as `sample_of`, `row_of` and `tokens_of` return it.
"""

from __future__ import annotations

import base64
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

SAMPLES = 5


def unpack(folder: Path) -> None:
    """Write the data sets into folders of this one.

    They are called "plain"; "chunk", "batch" and "sample", by what `compression="zstd"` compresses at once; "table", of
    samples that LitData writes as rows of Arrow; and "tokens", of `TokensLoader`.
    """
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode("".join(_WRITTEN.split())))) as archive:
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None
            (folder / member.name).parent.mkdir(parents=True, exist_ok=True)
            (folder / member.name).write_bytes(content.read())


def sample_of(number: int) -> dict[str, Any]:
    """A sample of every format, by the names that its values have in a record."""
    return {
        "int": number - 2,
        "float": number / 3,
        "text": "ü" * number,
        "bytes": bytes(number),
        "bool": number % 2 == 0,
        "pil": np.arange(12, dtype=np.uint8).reshape(2, 2, 3) + np.uint8(number),
        "vector": np.arange(number, dtype=np.float32),
        "array": np.arange(2 * number, dtype=np.int16).reshape(2, number),
        "tensors.vector": np.arange(number),
        "tensors.tensor": np.arange(2 * number, dtype=np.float16).reshape(number, 1, 2),
        "lists.texts": ["a"] * number,
        "lists.ints": [number],
        "lists.floats": [0.5, 1.5],
        "lists.bools": [True, False],
        "lists.mixed": [1, "x", None],
        "lists.dicts": [{"text": "b", "int": -number, "float": 0.5, "bool": True, "none": None}] * 2,
        "lists.dict": [{"x": {"y": [0.5]}, "z": number}],
    }


def row_of(number: int) -> dict[str, Any]:
    """A sample that LitData writes as a row of Arrow, by the names that its values have in a record."""
    return {"text": "ü" * number, "int": number, "list": [number] * number, "outer.inner": number / 3}


def tokens_of(number: int) -> dict[str, Any]:
    """A sample of tokens."""
    return {"0": np.arange(number, dtype=np.int32)}


_WRITTEN = """
/Td6WFoAAATm1rRGAgAhARwAAAAQz1jM4J//EuNdADEYSu7FLfgQek96+lxV5IMVZ7EtfT65LLd5x57D2P2LwU5SA6+QtU6dswSNYrNVcr9yKnLK
egSsxyJMxp9c+QT6Zsc6NLXtvjoJGDkfYSEUs4PUmG7npxlIIdPHddGPgkaLSUy52ySygIcNntra5QRiPxnzPaOKwkQridHaC3DRcWQe3rNC4RfZ
wuT24okniY/iKAHdnKVud3ywf8SuAU6lDmJz/pzdwhcMbwRhR2gyIdk1gaYWWNUI5sJC7ZwDScTmFRfhFEvwi3lmBltmyJqd74OJSAqWTM0bQVY7
+CLy8hFRzEULg9kSyQDC0aCjun7hth06v0b1ExArHPeI47eS9el9TwiDxVPc6PLEMqse8ti53bqSuTWMe4WNh1T7iiscI9cAdeljjBNRFXvObWDq
+HwG7t4jGP8ywtq2NmF6DGmcgM5jlSJOEdxCGmMJF6LcKcMIkUHBhAS5NczU/MvyZaqIBx7BLSdOyE+7vJhN4E6++0vvAV2Dka+hOf6hQ5Vptqou
b/nIYqyG3PhCOpjc1YIBEGeEULpqJ//Ct8ZG2KAapamlAPzHf7r/3C6+Uj/ZdOJscC6yFVfJMKiu3JXuCWHCpfjx83oRMuHkEAMKBMKHyn3ZI6W2
jiFcjVdN0XYZi7Y52cjYFJJFMN+TSkCjf0QoJyWd9htVcWnfloX/6Ql7essrMUf0C3WQScAZm4hif5QsIioIGTOa4xfYgKfElPOAP/ytO+gKgh5P
MP9D1V0JlGaZHVcyc1lPxiav8Lg4sugzSPqPXL2RG2lVp0qPrR008OP2HwukL8ZHcepWEJNAsMfwNiYc3Q8B91prmrcxZALX27QtCMOHlZ+H6Z/X
74DWrhruTaWBgBmZmeSSYpVzs/vBFA1a7h6oiqU4t30uRpV3DYqYi4+kxR9j2DJNs7x156N1OKw97wzt0I9jBjY202xoqLBOArlo8jpdug/YWp+a
qCfU9fpNJMCWIlzUz2U9EJVSefgt7EeNP4oPt8kkaOg4EHjVUaP2GEz3x9PeHfHIdmbRyLwbPro8ZlNNF3L8ShD7owqinJWJ6k0tvAZOTt3dK/L/
MdEr3/WE/8kwAPLokn6p1pHSDx5yJjfqqON6O7BEyAzH1HOPD5eK5afmXzHm8g8CdwDY8j4EhPqVEyTQFuvm5LE9jJnHBl/i6r1ml4/66vU987JK
h8VlGVdWXXrhaMo/XLTt7wHtf7KUEQQCGgUbMEqJbNekTYV7b7Xh+Ds+L/sZYAZ/EIgf2ErrC7MUrAeDx368G9lbVA9DFJKyXC1NA/kFVHFPIlp7
Y5ebH8X5G5j+6agRLV1f/T0dqSe6jg2Kav13Yjy4yO/ZaKtHSqv8o3rYpZqyNyw9E5ZXEpqlrKxPeffgJAiYXQuU1/Ox+Rh0MlNuIcwgkPYjvsXX
7q4q13QdYTz0uDcP5RVj2BtzHUlI8VqIOHq9OWgAHxr4esLPW6ymF6ijJsYxtn3tINFHg9ujGYZgGL+eNDIwb58P5E4GWnndxQ3r62fQohDuBnZZ
ViILzNnJDEQRm5fJGiA2tJaf9aXVzYGeDlpza27Q2Ft5zUUVCn71nPnmTgwQx1QheJ4Tce47dNLju+Sqm3L7eIWT/5oMH8r7StkxyRYPvEN48Ylr
TB/BMyx9Y0m/Ll2FMOzhP/k6wlOsAkYKQmtd5CS33nk5/wlpIP82o4JtTd+KuA12q1HtYSDolJq4NemsBw3Gmb7KJnq9kafWGTD/TImDTZ14YRfE
RpH7p60vEhI6ysZ6pkcP0Uk7qMO/zRW84Pl4WSxB7jzZ6+7Y+HFqIfFzi2JJN8IA0HgzU6nDvy3FkvUoppnsHSKNRY5bpoKCpSHkbAr5gijUXIwf
Cua1PtgMVaZiZjXbld/0E9SZGvQRdSkU+3yvN1eOKYXeu8TsUO6V54Jpi2wYuN/7WlYMENdlKQIuHLC8UC4yd6cFIBafRdIAymgn2DxkC7f7GTGV
1Kpl9aODGkrUVFbm5vRVDnqlrtdwKuG7dCNh8934PaesGseVmPjA1orJM0OkmLSctiMbsfJozcGXkEWiwHm5CrH9Mmo1obMBIz9AWdfUse8Ke4sv
Hmvxy8vnQKPUOMEwa6xLfS6GSXl326flUtoDBzpiF6H/9iLr2ApoR+LsJWazHJ20j+SP4Ffc5Bj9PUtXHn5ECvzsarOnHcar0nomzQdvkn5MSDXv
v1PQmIy84ykOUHDOpDjTCLOEngso5lVU7xfy2zCRuVBiP5lvMqlLvhvCXI4B1fW0C2+hRRfuypGvTXK7onnbOhlJwruVyd7ImoIoI9Ts2Rd8TQ5Y
KLkEE143QTcpji6eH+qWgL/T6E9kp9vvM35BeWoUBdhvbQpRFM0D1Xt/z9joi2Y3MJoG0CTPC3iEeZnBQnNKPqyuAQHg1emRNuJ1LAN0NYRXm2f5
RetKG4+7m6SAZiMyXEfZwqs9rXSR1fZzim9KzC/hbjyR/dGjyE/Lzdm1Tbzc0Sj8MTKojbMn1PRHiaabRgqzffC2q36jv5QrriI9I93ENghvNqDE
qO+mGgb3yJVXNPVYk0iDE2jp8SYwl7NLh9NHCtRKl0mcBBVp7dDOIFV2YaOuJkr4MAlQc0HpY+Lyy+8kO8f9bmSVpjz/kmrmZxicXklseeRXri27
+Te32CubrvAQO/3dnr2vkGjaWJNVuRbvpxesItbzUt/pm82eXlifMFJgeSUVQ+BO0MOG+EjpyBNjjXCAYvBKtKAEq0Ll6mUAI5sIJqvJkLZCZDIN
cVF4PqnXnSOK1Yl3N3MNZawZOx6N3QT4PUeEDvM37O6dV2dC8OGEWl9HuaFpOzeyjl5M9yWnUYYUb6neAuT9HgztIniz8DkDLBqW3/ZZO2Azq8ez
3vRU72+zihjaZ/7/OCV3r2VH8k8nNwr+B44IrinxLVroCaI+HmFSOJNHKkkx5wkehwn3Pyk+jCQllNcyHcqaEePuQ2wYVJwmk2saP6uk59O4u/u2
JIQjbXEELKEYSfTWiDfFrCcXt1QY7+k3NjJ5Cx4DRfTLvog/Z4BH4G9T+R1UQ7JEkmRZQJ6Ealz1QE4jv5fcTah4hQnPwj8kVfMvGfbaeWfe5Cj4
l565erAUyQnOw0o6vEx0/888znPcYaUa46WNM1nyAruJGVj0ASIJgv8drAJj1iLjOStNOnNIY+Ndc65TIBCaPQb8c5S2xcT4BJwNc4ip1YTv/T2O
65QWD4lj+3RhsOPF+4QG5o2ahJs5wyJ7k+f12v6N1Imb/PAKUMHEZ1wQd+WLwo1EOaAx/4QSufODCUG8wPQb1q+2kBGTMijPWBakb/eupDPcCLZ/
no00VYNgTKiZxTkXo1IY1d9si19VkXJvnRY0XrF8VCsbfZ+NZrGRzR4Mab0tuZVBKeJgQnrnaGYYbmp9tdhs0kC2OeO1pdgMtLbns2LsLKEEwSm0
yzjxzX1+oEYAvEFnbWLSwSpLuro6z/XMwn1uaQgICQx+elCWI6+vo2gT6ZskAathPJErar7CfvNPdp7/6/ePRKookYLksye0koQQioNxJ5sUV8LK
QXdFTks7I6Yo8nIdZNvOn91xUs7510pHRwQ1UwcrK0I7wNZkjMZRjMueJGkm9P6jqJHikv6IKLMMnTc3oZHVTKJQ4nJMkG6x8izzHOhyltxIXoF7
3cee0f7N5h3AEg6nQ25WjwDH1XuD1A/fbCDER2D3jdv6YYLV8eG36sAAigLGA2RhXUORBFZxZ9r+n9zX5qSc1nHrW8Jj4kJFaiFsYaFlardgeo8s
RfIzRUi4xkXe8z0dgsxyHEdWmvnLT7mAh8mDl0QCem907nbd+gpu58vQ4kcMniLw1F2GOHl/V0Jvs3ds9fs5eudLBIiD8X68URp0TO4k3JR036vN
HEzF3FMpPWM9QvFstxbwaxyIDIOpP8voT4o7uhaAabwctnUO/E0XqTkDsdXCF50ZNUtcrwDtTt1OOlW81NiSXtAJXiKhjU2NCQ9nSRDkMkbx4N1Q
8RxSBAA1pBYRDfVOdqtjIMzdfs1Gt18n4nGQgttwePaGXHnlRX8teILMS5r274E7JWFnH4jVK7hZh3YAbQi0xyTxjuu4wzgT4MsoSoyx8OzrSw+n
NpLbhC4nvzqLHiTSoL5t8AGApBFvSZBGg6GiqfzRURsFXw/z+KW1LBbotfaBvILgvhB6zdFUdmq9QJNOBOned4YAiviDjKP5XqyGQO4H/chfWVyA
E6BJdAH+OqpqrFlJdrBf3hAhklEY9ezJ3pe1YbYJs/mLify1F4z7u65sm9USiABL3w88HD+28VN9N73b5nUSMrG+89tN937vtXBbKd7Xwh+VH9x3
a3X4Bya9SRC/IOJbRT2pLcyoaoEIltrBvXR8D9YedtCz7Q3kndPpzkRDQ/6J/mMfPkDrChmGE7+aPJgo17X+fhplL4nRe3zz/MHWuhmnZB6frN1y
Y2oU43rzwgJ3TBfJ11MaWbjwr+TwQDfZ3DT2MFr2Qd7fb0N3l2kfMyFn06+VW876uE2sssr5g/y+0XvYzErw6KNJCtoBHTnmghGkQOMTrQaktCKk
PDMCE/dVxXyKWzWd41N9yFSWisxZXuwNLGBoIeEn9znVOu0DAqgsl9J2lliH3bJpI72/RaehkJpS73xTj+eCocc5suFWtQQt4JsFFT9iPuYKRCqF
GZKjaCXa2+kElwuvV2u4pRJ1fb6Vdm9fVl439KYj+phnOwhT0fnXjv9M2V6E4V/dlf+9HAdc9J8kHJeyVRM/mkzaDTosNH9pd8zFkF6ygeqFQ9M5
XeaJW01kvpV1iFQ7IZCx3JXHEQnN/PzKwpAb7pqGgXhq1/9yGYbpsi1FzIqCp5sRpkSrQqVh21/7p8+wzpeSoBuOHale5lGgG3FvkxXE3ZYVvK5X
ires6A29wBhNn522f86wjAghqMJp8TlSuGveMdL/RJEZ3zIUk28PiUZjpM8NcaSSr1wBSM1NUSDd6YxlMegISC4wa2ixBIBu/o8WqAx4QlHLnYbU
1nh1QSzlPUcXNL2p7mwcb4axAJRfibGBEG5IZmoCC1i3TYnDbOZUsAGZCJYJ0jYsfvkkVe4e71JATV/oHL1i+VUFN+A6ZxoVvpVBhKVxoSiuDKtW
MOm7jGn6uZOLK5sSBIPYbIStCrupcHP51bdoq13NvWanvceuZL6D+1OlFg/k8qEmaK5QeJPg3fO3r0cK6s7rJgZVDUrVo68azplALQsQUGFu0qZa
aWnnz2Y5LJNGmK4NdY5KxJRCajXpDZfbatH6jXT+Ms4gdmsJ9fBjRnUrP7nQ7bZ7RCmj4XAy9nUhHnznXdQ1ZBntxho+zjjSEPVCjSbqs++Y9GAF
YPnh+8vLfR13Z4LHSKNzhwywSxDmYTjbpX/Pdd56p5ldOGmR3DCV0CzD4kAfHwmct9GDTOhQlRlfYiCxbBifFCP6lhq8BjlydEebY8+dtwTf269J
bcausnFsxRh+8XygfZVblPVbar2oui0/PgwwtFhN78mlMDrtTrsxlFzzhVGdThpJ/lJQ4riAbQ6RvR7LdF6IIOoLxBuiBiAy+uQKStggBPfNUvxv
pCAXQJ2D8eUESNqKw24dUyN8cuP7rIO+UK+pajXZ6FLa5G4S1827JSKPQ0M3WI0fSrRpnUwpeC90I1WyDaXZUBcGRlY0PK69K4VVXRXiw6r9Xa+q
oVdCUaWG1k25VyIUDG2BB8r6A9gsKWPYxlYk60aMyD+F7OWLVTwpb3UsgqIcTo8rGDpRptqU3LMg5pgitZ+8QsMoq+d9fiXlgZOxzjjzdBwpfgxO
GTOCFbPKldGSwujOp1Fm63eISSskBf3R5ezGAa2GfZBTT6rIEVvePC78HxNe1wlfcUBC2pWnqvErDWDEDTJYBbNXHDQ/67/T5PzX2HxbqXS/cfX6
+xuwVQ5nVmM1e6/ZU6xP0LEjqcaDRqjmGR2gae4scpfAX9GcPFzzVR8/nbuu+PNp7KFb0i1H3ZAEzhIKaBB6+GqRy54dU+vbbJSrYTP6PW69zH+n
McmaRu0WsW8hEv+1/7c0P4ECv/IplhBbVnBF3jxQUaGLONndlCO93dIImAkW2ChEFNTpbwKgHoZjuNJeTcC3XJF9oRcVYkl/rwTi5JoToRcP4TKd
TGSp9BxkdlUn/vk8bfyo9F5qRQPFRHzbNNjcefSRtykH6+U0H6wjI3hHluDS8M+nuFFMlVH9q7VVPOw+rnBWerbDlJSeoTRPbmHslPsaUZQFnEmU
Bb2de0sQExgGtDXb32vQbUfajTt/so97vtKInLTFyzlzMIATqo3R9T75Bbg7mLidXZuYMnmFvoTNkgqEeKdD8wjgBeqBmUWEywRof+Pb6OpBpz4F
gjy0qlYGpq1laDIpSfTW0vfOaqByHQhOnpvl7BCWAVTnoctvDVVkA6rIL+dGH05CDX6NH0UuO7Ni6xl5uicis0677R73u8j/StcaBVdNAAB/ZiDe
gCmqgQAB/yWAwAIAnJ1wYLHEZ/sCAAAAAARZWg==
"""
