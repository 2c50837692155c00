//! Protobuf's wire format, read in place: no message is built, so a hostile file costs no more
//! memory than what is taken out of it.
//!
//! Source: protobuf.dev, "Encoding". Groups (wire types 3 and 4) are of no use to ONNX and refused.

/// Why bytes are no protobuf message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The bytes end within a field.
    #[error("it ends within a field")]
    Truncated,
    /// A number has more than 64 bits.
    #[error("a number has more than 64 bits")]
    Varint,
    /// A field number of 0 or beyond 2^29, or a wire type that is not used.
    #[error("a tag is none")]
    Tag,
    /// A field has another type than ONNX gives it.
    #[error("a field has another type than in ONNX")]
    Type,
    /// Text is not UTF-8.
    #[error("text is not UTF-8")]
    Text,
    /// There is more of something than is read.
    #[error("it has more {0} than are read")]
    TooMany(&'static str),
    /// What must be there once is not, or is there twice.
    #[error("it has no {0}, or two")]
    NotOne(&'static str),
}

/// A field's value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Value<'a> {
    Varint(u64),
    Fixed64([u8; 8]),
    Bytes(&'a [u8]),
    Fixed32([u8; 4]),
}

impl<'a> Value<'a> {
    pub(super) fn bytes(self) -> Result<&'a [u8], Malformed> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            _ => Err(Malformed::Type),
        }
    }

    pub(super) fn text(self) -> Result<&'a str, Malformed> {
        std::str::from_utf8(self.bytes()?).map_err(|_| Malformed::Text)
    }

    /// int32 and int64 alike: a negative one has 64 bits on the wire.
    pub(super) fn int(self) -> Result<i64, Malformed> {
        match self {
            Self::Varint(v) => Ok(v.cast_signed()),
            _ => Err(Malformed::Type),
        }
    }

    pub(super) fn float(self) -> Result<f32, Malformed> {
        match self {
            Self::Fixed32(bytes) => Ok(f32::from_le_bytes(bytes)),
            _ => Err(Malformed::Type),
        }
    }

    /// Appends one number, or all of a packed field.
    pub(super) fn ints(self, into: &mut Vec<i64>) -> Result<(), Malformed> {
        let Self::Bytes(mut packed) = self else {
            into.push(self.int()?);
            return Ok(());
        };
        while !packed.is_empty() {
            into.push(varint(&mut packed)?.cast_signed());
        }
        Ok(())
    }

    pub(super) fn floats(self, into: &mut Vec<f32>) -> Result<(), Malformed> {
        match self {
            Self::Fixed32(bytes) => into.push(f32::from_le_bytes(bytes)),
            Self::Bytes(packed) => into.extend(numbers(packed, f32::from_le_bytes)?),
            _ => return Err(Malformed::Type),
        }
        Ok(())
    }

    pub(super) fn doubles(self, into: &mut Vec<f64>) -> Result<(), Malformed> {
        match self {
            Self::Fixed64(bytes) => into.push(f64::from_le_bytes(bytes)),
            Self::Bytes(packed) => into.extend(numbers(packed, f64::from_le_bytes)?),
            _ => return Err(Malformed::Type),
        }
        Ok(())
    }
}

/// Numbers of `N` bytes each, little-endian.
pub(super) fn numbers<const N: usize, T>(
    packed: &[u8],
    number: fn([u8; N]) -> T,
) -> Result<impl Iterator<Item = T>, Malformed> {
    let (chunks, rest) = packed.as_chunks::<N>();
    if !rest.is_empty() {
        return Err(Malformed::Truncated);
    }
    Ok(chunks.iter().map(move |chunk| number(*chunk)))
}

fn varint(rest: &mut &[u8]) -> Result<u64, Malformed> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, after) = rest.split_first().ok_or(Malformed::Truncated)?;
        *rest = after;
        // The tenth byte has one bit left.
        if shift == 63 && byte > 1 {
            return Err(Malformed::Varint);
        }
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err(Malformed::Varint)
}

fn take<'a>(rest: &mut &'a [u8], count: usize) -> Result<&'a [u8], Malformed> {
    let (taken, after) = rest.split_at_checked(count).ok_or(Malformed::Truncated)?;
    *rest = after;
    Ok(taken)
}

fn array<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], Malformed> {
    let (taken, after) = rest.split_first_chunk::<N>().ok_or(Malformed::Truncated)?;
    *rest = after;
    Ok(*taken)
}

/// The fields of a message, in order: (field number, value). Ends after the first error.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    fn field(&mut self) -> Result<(u64, Value<'a>), Malformed> {
        let rest = &mut self.0;
        let tag = varint(rest)?;
        let number = tag >> 3;
        if !(1..1 << 29).contains(&number) {
            return Err(Malformed::Tag);
        }
        let value = match tag & 7 {
            0 => Value::Varint(varint(rest)?),
            1 => Value::Fixed64(array(rest)?),
            2 => {
                let length = varint(rest)?;
                let length = usize::try_from(length).map_err(|_| Malformed::Truncated)?;
                Value::Bytes(take(rest, length)?)
            }
            5 => Value::Fixed32(array(rest)?),
            _ => return Err(Malformed::Tag),
        };
        Ok((number, value))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Value<'a>), Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.0 = &[];
        }
        Some(field)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(bytes: &[u8]) -> Result<Vec<(u64, Value<'_>)>, Malformed> {
        Fields(bytes).collect()
    }

    #[test]
    fn fields_of_every_wire_type_are_read() {
        // 150 is protobuf.dev's own example.
        let bytes = [
            0x08, 0x96, 0x01, // 1: varint 150
            0x12, 0x02, b'h', b'i', // 2: "hi"
            0x1d, 0, 0, 0x80, 0x3f, // 3: 1.0f
            0x21, 1, 0, 0, 0, 0, 0, 0, 0, // 4: fixed64
        ];
        let fields = all(&bytes).unwrap();
        assert_eq!(fields[0], (1, Value::Varint(150)));
        assert_eq!(fields[1].1.text(), Ok("hi"));
        assert_eq!(fields[2].1.float(), Ok(1.0));
        assert_eq!(fields[3], (4, Value::Fixed64([1, 0, 0, 0, 0, 0, 0, 0])));
    }

    #[test]
    fn packed_and_single_numbers_are_alike() {
        let mut ints = Vec::new();
        Value::Bytes(&[1, 0x96, 1]).ints(&mut ints).unwrap();
        Value::Varint(u64::MAX).ints(&mut ints).unwrap();
        assert_eq!(ints, [1, 150, -1]);
        let mut floats = Vec::new();
        Value::Bytes(&[0, 0, 0x80, 0x3f]).floats(&mut floats).unwrap();
        Value::Fixed32([0, 0, 0, 0x40]).floats(&mut floats).unwrap();
        assert_eq!(floats, [1.0, 2.0]);
        assert_eq!(Value::Bytes(&[0; 5]).floats(&mut floats), Err(Malformed::Truncated));
    }

    #[test]
    fn malformed_bytes_are_refused() {
        assert_eq!(all(&[0x08]), Err(Malformed::Truncated));
        assert_eq!(all(&[0x12, 0x05, b'h']), Err(Malformed::Truncated));
        // A length of 2^63.
        let long = [0x12, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x01];
        assert_eq!(all(&long), Err(Malformed::Truncated));
        assert_eq!(
            all(&[0x08, 0xff, 255, 255, 255, 255, 255, 255, 255, 255, 2]),
            Err(Malformed::Varint)
        );
        // Field 0, and a group.
        assert_eq!(all(&[0x00, 0x00]), Err(Malformed::Tag));
        assert_eq!(all(&[0x0b]), Err(Malformed::Tag));
        assert_eq!(Value::Varint(1).bytes(), Err(Malformed::Type));
        assert_eq!(Value::Bytes(&[0xff]).text(), Err(Malformed::Text));
    }
}
