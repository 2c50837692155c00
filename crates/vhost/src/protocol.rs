//! The vhost-user protocol, the back end's side: messages as they come over the socket.
//!
//! A message is a header, a body of at most [`BODY_MAX`] bytes and at most [`FDS_MAX`] file
//! descriptors. [`Message::parse`] decides on bytes alone whether it is one; whether it makes sense
//! is the session's matter. All numbers are in the machine's byte order, as the protocol has it.
//!
//! Written to the "Vhost-user Protocol" in QEMU's documentation (docs/interop/vhost-user.rst).

use rtvirtio_virtq::memory::RegionSpec;

mod connection;
pub mod features;

pub use connection::send;
pub use connection::{Connection, Received, TransportError};

/// The longest body that is accepted. The longest that any front end has reason to send is a
/// configuration space of 256 bytes with its header, or a table of 8 regions: 268 and 264 bytes.
pub const BODY_MAX: usize = 4096;
/// File descriptors with one message: one for each region of SET_MEM_TABLE.
pub const FDS_MAX: usize = 8;
/// Bytes of a header.
pub const HEADER_SIZE: usize = 12;
/// The most of the configuration space that one message reads or writes.
pub const CONFIG_MAX: u32 = 256;

const FLAG_VERSION: u32 = 0x3;
const VERSION: u32 = 0x1;
const FLAG_REPLY: u32 = 0x4;
const FLAG_NEED_REPLY: u32 = 0x8;
/// In SET_VRING_KICK, _CALL and _ERR: no file descriptor comes with it.
const NO_FD: u64 = 0x100;

macro_rules! requests {
    ($($name:ident = $number:literal $text:literal,)*) => {
        /// What a front end asks for.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u32)]
        pub enum Request {
            $(#[doc = $text] $name = $number,)*
        }

        impl Request {
            /// All that are known.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            const fn from_number(number: u32) -> Option<Self> {
                match number {
                    $($number => Some(Self::$name),)*
                    _ => None,
                }
            }
        }

        impl std::fmt::Display for Request {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self {
                    $(Self::$name => $text,)*
                })
            }
        }
    };
}

requests! {
    GetFeatures = 1 "GET_FEATURES",
    SetFeatures = 2 "SET_FEATURES",
    SetOwner = 3 "SET_OWNER",
    ResetOwner = 4 "RESET_OWNER",
    SetMemTable = 5 "SET_MEM_TABLE",
    SetLogBase = 6 "SET_LOG_BASE",
    SetLogFd = 7 "SET_LOG_FD",
    SetVringNum = 8 "SET_VRING_NUM",
    SetVringAddr = 9 "SET_VRING_ADDR",
    SetVringBase = 10 "SET_VRING_BASE",
    GetVringBase = 11 "GET_VRING_BASE",
    SetVringKick = 12 "SET_VRING_KICK",
    SetVringCall = 13 "SET_VRING_CALL",
    SetVringErr = 14 "SET_VRING_ERR",
    GetProtocolFeatures = 15 "GET_PROTOCOL_FEATURES",
    SetProtocolFeatures = 16 "SET_PROTOCOL_FEATURES",
    GetQueueNum = 17 "GET_QUEUE_NUM",
    SetVringEnable = 18 "SET_VRING_ENABLE",
    SendRarp = 19 "SEND_RARP",
    NetSetMtu = 20 "NET_SET_MTU",
    SetBackendReqFd = 21 "SET_BACKEND_REQ_FD",
    GetConfig = 24 "GET_CONFIG",
    SetConfig = 25 "SET_CONFIG",
    GetInflightFd = 31 "GET_INFLIGHT_FD",
    SetInflightFd = 32 "SET_INFLIGHT_FD",
    ResetDevice = 34 "RESET_DEVICE",
    GetMaxMemSlots = 36 "GET_MAX_MEM_SLOTS",
    AddMemReg = 37 "ADD_MEM_REG",
    RemMemReg = 38 "REM_MEM_REG",
    SetStatus = 39 "SET_STATUS",
    GetStatus = 40 "GET_STATUS",
}

/// What precedes each body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Number of the request.
    pub request: u32,
    /// Version, and whether it is a reply or needs one.
    pub flags: u32,
    /// Bytes of the body.
    pub size: u32,
}

impl Header {
    /// The header of a message to the front end.
    pub(crate) const fn reply(request: u32, size: u32) -> Self {
        Self { request, flags: VERSION | FLAG_REPLY, size }
    }

    /// The header of a request of ours, on the back end's channel.
    pub(crate) const fn request(request: u32) -> Self {
        Self { request, flags: VERSION, size: 0 }
    }

    /// Reads the fields.
    #[must_use]
    pub fn from_bytes(bytes: [u8; HEADER_SIZE]) -> Self {
        let mut fields = Fields(&bytes);
        Self { request: fields.u32(), flags: fields.u32(), size: fields.u32() }
    }

    /// As it is sent.
    #[must_use]
    pub fn to_bytes(self) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        bytes[..4].copy_from_slice(&self.request.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.flags.to_ne_bytes());
        bytes[8..].copy_from_slice(&self.size.to_ne_bytes());
        bytes
    }

    /// Whether the front end asks to be told the outcome (REPLY_ACK).
    #[must_use]
    pub const fn needs_reply(&self) -> bool {
        self.flags & FLAG_NEED_REPLY != 0
    }

    /// Whether a body follows that can be received at all.
    pub(crate) const fn check(&self) -> Result<(), MessageError> {
        if self.flags & FLAG_VERSION != VERSION
            || self.flags & !(FLAG_VERSION | FLAG_NEED_REPLY) != 0
        {
            return Err(MessageError::Flags(self.flags));
        }
        if self.size as usize > BODY_MAX {
            return Err(MessageError::TooLong(self.size));
        }
        Ok(())
    }
}

/// Why bytes are no message that is known here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Not version 1, a reply, or bits that mean nothing.
    #[error("a header with the flags {0:#x}")]
    Flags(u32),
    /// More than [`BODY_MAX`].
    #[error("a body of {0} bytes")]
    TooLong(u32),
    /// A request that is not supported, or that does not exist.
    #[error("request {0} is not supported")]
    Unknown(u32),
    /// The body does not have the length that it must have.
    #[error("{request} with a body of {size} bytes")]
    Size {
        /// Which.
        request: Request,
        /// Bytes of its body.
        size: usize,
    },
    /// Too few file descriptors, or too many.
    #[error("{request} with {fds} file descriptors")]
    Fds {
        /// Which.
        request: Request,
        /// How many came with it.
        fds: usize,
    },
    /// A field has a value that it must not have.
    #[error("{request} with a bad {field}")]
    Field {
        /// Which.
        request: Request,
        /// The field's name.
        field: &'static str,
    },
}

/// A virtqueue's index and a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VringState {
    /// Which virtqueue.
    pub index: u32,
    /// The number.
    pub num: u32,
}

/// A virtqueue's index, and whether a file descriptor comes with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VringFd {
    /// Which virtqueue.
    pub index: u32,
    /// Whether a file descriptor comes with it.
    pub fd: bool,
}

/// Where a virtqueue lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VringAddress {
    /// Which virtqueue.
    pub index: u32,
    /// Descriptor table, in the front end's virtual addresses, as the next two.
    pub descriptors: u64,
    /// Used ring (packed: device event suppression).
    pub used: u64,
    /// Available ring (packed: driver event suppression).
    pub available: u64,
    /// Guest address at which writes to the used ring are logged, if they are.
    pub log: Option<u64>,
}

/// The shared area in which requests in flight are noted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InflightArea {
    /// Bytes.
    pub size: u64,
    /// Where it begins in its file.
    pub offset: u64,
    /// Virtqueues.
    pub queues: u16,
    /// Entries of each.
    pub queue_size: u16,
    /// Whether the C structure's padding came with it; the answer then has it too.
    pub padded: bool,
}

/// A request with what belongs to it, apart from file descriptors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// GET_FEATURES
    GetFeatures,
    /// SET_FEATURES
    SetFeatures(u64),
    /// SET_OWNER
    SetOwner,
    /// RESET_OWNER
    ResetOwner,
    /// SET_MEM_TABLE, one file descriptor for each region
    SetMemTable(Vec<RegionSpec>),
    /// SET_LOG_BASE, with the log's file descriptor
    SetLogBase {
        /// Bytes.
        size: u64,
        /// Where it begins in its file.
        offset: u64,
    },
    /// SET_LOG_FD, with an eventfd
    SetLogFd,
    /// SET_VRING_NUM
    SetVringNum(VringState),
    /// SET_VRING_ADDR
    SetVringAddr(VringAddress),
    /// SET_VRING_BASE
    SetVringBase(VringState),
    /// GET_VRING_BASE
    GetVringBase(u32),
    /// SET_VRING_KICK
    SetVringKick(VringFd),
    /// SET_VRING_CALL
    SetVringCall(VringFd),
    /// SET_VRING_ERR
    SetVringErr(VringFd),
    /// GET_PROTOCOL_FEATURES
    GetProtocolFeatures,
    /// SET_PROTOCOL_FEATURES
    SetProtocolFeatures(u64),
    /// GET_QUEUE_NUM
    GetQueueNum,
    /// SET_VRING_ENABLE
    SetVringEnable {
        /// Which virtqueue.
        index: u32,
        /// Whether it is to be served.
        enabled: bool,
    },
    /// SEND_RARP, of the guest with this MAC address
    SendRarp([u8; 6]),
    /// NET_SET_MTU
    NetSetMtu(u64),
    /// SET_BACKEND_REQ_FD, with a socket
    SetBackendReqFd,
    /// GET_CONFIG
    GetConfig {
        /// First byte of the configuration space.
        offset: u32,
        /// Bytes, at most [`CONFIG_MAX`].
        size: u32,
        /// To be returned as they came.
        flags: u32,
    },
    /// SET_CONFIG
    SetConfig {
        /// First byte of the configuration space.
        offset: u32,
        /// What to write, at most [`CONFIG_MAX`] bytes.
        data: Vec<u8>,
    },
    /// GET_INFLIGHT_FD
    GetInflightFd(InflightArea),
    /// SET_INFLIGHT_FD, with the area's file descriptor
    SetInflightFd(InflightArea),
    /// RESET_DEVICE
    ResetDevice,
    /// GET_MAX_MEM_SLOTS
    GetMaxMemSlots,
    /// ADD_MEM_REG, with the region's file descriptor
    AddMemReg(RegionSpec),
    /// REM_MEM_REG; a file descriptor that comes with it means nothing
    RemMemReg(RegionSpec),
    /// SET_STATUS
    SetStatus(u8),
    /// GET_STATUS
    GetStatus,
}

impl Message {
    /// Makes sense of a header, its body and the number of file descriptors.
    ///
    /// # Errors
    /// [`MessageError`]: the front end breaks the protocol, or uses a part that was not offered.
    pub fn parse(header: Header, body: &[u8], fds: usize) -> Result<Self, MessageError> {
        header.check()?;
        let request =
            Request::from_number(header.request).ok_or(MessageError::Unknown(header.request))?;
        let bad_size = MessageError::Size { request, size: body.len() };
        if header.size as usize != body.len() {
            return Err(bad_size);
        }
        let sized = |size: usize| if body.len() == size { Ok(Fields(body)) } else { Err(bad_size) };
        let bad = |field| MessageError::Field { request, field };

        // How many file descriptors may come, the most and the least.
        let mut expected = 0..=0;
        let message = match request {
            Request::GetFeatures => sized(0).map(|_| Self::GetFeatures)?,
            Request::SetFeatures => Self::SetFeatures(sized(8)?.u64()),
            Request::SetOwner => sized(0).map(|_| Self::SetOwner)?,
            Request::ResetOwner => sized(0).map(|_| Self::ResetOwner)?,
            Request::SetMemTable => {
                let mut fields = Fields(body);
                if body.len() < 8 {
                    return Err(bad_size);
                }
                let regions = fields.u32() as usize;
                let _padding = fields.u32();
                if !(1..=FDS_MAX).contains(&regions) {
                    return Err(bad("number of regions"));
                }
                // User Mode Linux sends room for two, and has one.
                if body.len() < 8 + 32 * regions || body.len() > 8 + 32 * FDS_MAX {
                    return Err(bad_size);
                }
                expected = regions..=regions;
                Self::SetMemTable((0..regions).map(|_| fields.region()).collect())
            }
            Request::SetLogBase => {
                let mut fields = sized(16)?;
                expected = 1..=1;
                Self::SetLogBase { size: fields.u64(), offset: fields.u64() }
            }
            Request::SetLogFd => {
                // Some send the queue's index and flags, as with the other file descriptors.
                if !matches!(body.len(), 0 | 8) {
                    return Err(bad_size);
                }
                expected = 1..=1;
                Self::SetLogFd
            }
            Request::SetVringNum => Self::SetVringNum(sized(8)?.state()),
            Request::SetVringAddr => {
                let mut fields = sized(40)?;
                let (index, flags) = (fields.u32(), fields.u32());
                if flags & !1 != 0 {
                    return Err(bad("flags"));
                }
                let (descriptors, used) = (fields.u64(), fields.u64());
                let (available, log) = (fields.u64(), fields.u64());
                let log = (flags & 1 != 0).then_some(log);
                Self::SetVringAddr(VringAddress { index, descriptors, used, available, log })
            }
            Request::SetVringBase => Self::SetVringBase(sized(8)?.state()),
            Request::GetVringBase => Self::GetVringBase(sized(8)?.state().index),
            Request::SetVringKick | Request::SetVringCall | Request::SetVringErr => {
                let value = sized(8)?.u64();
                if value & !(NO_FD | 0xff) != 0 {
                    return Err(bad("index"));
                }
                let vring = VringFd { index: (value & 0xff) as u32, fd: value & NO_FD == 0 };
                expected = if vring.fd { 1..=1 } else { 0..=0 };
                match request {
                    Request::SetVringKick => Self::SetVringKick(vring),
                    Request::SetVringCall => Self::SetVringCall(vring),
                    _ => Self::SetVringErr(vring),
                }
            }
            Request::GetProtocolFeatures => sized(0).map(|_| Self::GetProtocolFeatures)?,
            Request::SetProtocolFeatures => Self::SetProtocolFeatures(sized(8)?.u64()),
            Request::GetQueueNum => sized(0).map(|_| Self::GetQueueNum)?,
            Request::SetVringEnable => match sized(8)?.state() {
                VringState { index, num: num @ 0..=1 } => {
                    Self::SetVringEnable { index, enabled: num == 1 }
                }
                _ => return Err(bad("number")),
            },
            Request::SendRarp => {
                // The address is the first six bytes in memory.
                let [a, b, c, d, e, f, ..] = sized(8)?.u64().to_ne_bytes();
                Self::SendRarp([a, b, c, d, e, f])
            }
            Request::NetSetMtu => Self::NetSetMtu(sized(8)?.u64()),
            Request::SetBackendReqFd => {
                if !matches!(body.len(), 0 | 8) {
                    return Err(bad_size);
                }
                expected = 1..=1;
                Self::SetBackendReqFd
            }
            Request::GetConfig | Request::SetConfig => {
                if body.len() < 12 {
                    return Err(bad_size);
                }
                let mut fields = Fields(body);
                let (offset, size, flags) = (fields.u32(), fields.u32(), fields.u32());
                if offset.checked_add(size).is_none_or(|end| end > CONFIG_MAX) {
                    return Err(bad("range"));
                }
                // To read, some send room for the answer and some do not.
                let data = fields.0;
                let read = request == Request::GetConfig;
                if data.len() != size as usize && !(read && data.is_empty()) {
                    return Err(bad_size);
                }
                if read {
                    Self::GetConfig { offset, size, flags }
                } else {
                    Self::SetConfig { offset, data: data.to_vec() }
                }
            }
            Request::GetInflightFd | Request::SetInflightFd => {
                let padded = match body.len() {
                    20 => false,
                    24 => true,
                    _ => return Err(bad_size),
                };
                let mut fields = Fields(body);
                let area = InflightArea {
                    size: fields.u64(),
                    offset: fields.u64(),
                    queues: fields.u16(),
                    queue_size: fields.u16(),
                    padded,
                };
                if request == Request::GetInflightFd {
                    Self::GetInflightFd(area)
                } else {
                    expected = 1..=1;
                    Self::SetInflightFd(area)
                }
            }
            Request::ResetDevice => sized(0).map(|_| Self::ResetDevice)?,
            Request::GetMaxMemSlots => sized(0).map(|_| Self::GetMaxMemSlots)?,
            Request::AddMemReg => {
                let region = sized(40)?.skip(8).region();
                expected = 1..=1;
                Self::AddMemReg(region)
            }
            Request::RemMemReg => {
                let region = sized(40)?.skip(8).region();
                // The protocol asks back ends to bear with front ends that send one.
                expected = 0..=1;
                Self::RemMemReg(region)
            }
            Request::SetStatus => match sized(8)?.u64() {
                status @ 0..=0xff => Self::SetStatus(status as u8),
                _ => return Err(bad("status")),
            },
            Request::GetStatus => sized(0).map(|_| Self::GetStatus)?,
        };
        if !expected.contains(&fds) {
            return Err(MessageError::Fds { request, fds });
        }
        Ok(message)
    }

    /// The request that it is.
    #[must_use]
    pub const fn request(&self) -> Request {
        match self {
            Self::GetFeatures => Request::GetFeatures,
            Self::SetFeatures(_) => Request::SetFeatures,
            Self::SetOwner => Request::SetOwner,
            Self::ResetOwner => Request::ResetOwner,
            Self::SetMemTable(_) => Request::SetMemTable,
            Self::SetLogBase { .. } => Request::SetLogBase,
            Self::SetLogFd => Request::SetLogFd,
            Self::SetVringNum(_) => Request::SetVringNum,
            Self::SetVringAddr(_) => Request::SetVringAddr,
            Self::SetVringBase(_) => Request::SetVringBase,
            Self::GetVringBase(_) => Request::GetVringBase,
            Self::SetVringKick(_) => Request::SetVringKick,
            Self::SetVringCall(_) => Request::SetVringCall,
            Self::SetVringErr(_) => Request::SetVringErr,
            Self::GetProtocolFeatures => Request::GetProtocolFeatures,
            Self::SetProtocolFeatures(_) => Request::SetProtocolFeatures,
            Self::GetQueueNum => Request::GetQueueNum,
            Self::SetVringEnable { .. } => Request::SetVringEnable,
            Self::SendRarp(_) => Request::SendRarp,
            Self::NetSetMtu(_) => Request::NetSetMtu,
            Self::SetBackendReqFd => Request::SetBackendReqFd,
            Self::GetConfig { .. } => Request::GetConfig,
            Self::SetConfig { .. } => Request::SetConfig,
            Self::GetInflightFd(_) => Request::GetInflightFd,
            Self::SetInflightFd(_) => Request::SetInflightFd,
            Self::ResetDevice => Request::ResetDevice,
            Self::GetMaxMemSlots => Request::GetMaxMemSlots,
            Self::AddMemReg(_) => Request::AddMemReg,
            Self::RemMemReg(_) => Request::RemMemReg,
            Self::SetStatus(_) => Request::SetStatus,
            Self::GetStatus => Request::GetStatus,
        }
    }
}

/// Takes fields off the front of a body whose length was checked.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) = self.0.split_first_chunk().expect("the body's length was checked");
        self.0 = rest;
        *field
    }

    fn skip(self, bytes: usize) -> Self {
        Self(&self.0[bytes..])
    }

    fn u16(&mut self) -> u16 {
        u16::from_ne_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_ne_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_ne_bytes(self.take())
    }

    fn state(&mut self) -> VringState {
        VringState { index: self.u32(), num: self.u32() }
    }

    fn region(&mut self) -> RegionSpec {
        RegionSpec {
            guest: self.u64(),
            size: self.u64(),
            front_end: self.u64(),
            offset: self.u64(),
        }
    }
}

#[cfg(test)]
mod tests;
