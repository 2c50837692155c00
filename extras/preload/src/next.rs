//! The definitions behind ours: the C library's, or another preloaded library's.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Functions that this library has a definition of.
macro_rules! symbols {
    ($($name:ident),* $(,)?) => {
        /// A function of the C library, by its name there.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[allow(non_camel_case_types)]
        #[repr(usize)]
        pub(crate) enum Symbol {
            $($name),*
        }

        const ALL: &[Symbol] = &[$(Symbol::$name),*];

        impl Symbol {
            const fn name(self) -> &'static CStr {
                match self {
                    $(Self::$name => {
                        match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                            Ok(name) => name,
                            Err(_) => c"",
                        }
                    })*
                }
            }
        }

        static ADDRESSES: [AtomicPtr<c_void>; ALL.len()] =
            [const { AtomicPtr::new(null_mut()) }; ALL.len()];
    };
}

symbols!(
    pread,
    pread64,
    __pread_chk,
    __pread64_chk,
    preadv,
    preadv64,
    preadv2,
    preadv64v2,
    pwrite,
    pwrite64,
    pwritev,
    pwritev64,
    pwritev2,
    pwritev64v2,
    prctl,
);

/// The next definition's address, or null if there is none, in which case nobody can have linked to it.
///
/// Looked up when it is first asked for, which may be before this library's constructor: other libraries'
/// constructors call these functions too.
pub(crate) fn address(symbol: Symbol) -> *mut c_void {
    let Some(kept) = ADDRESSES.get(symbol as usize) else { return null_mut() };
    let address = kept.load(Ordering::Relaxed);
    if !address.is_null() {
        return address;
    }
    // SAFETY: the name ends with a zero byte.
    let address = unsafe { libc::dlsym(libc::RTLD_NEXT, symbol.name().as_ptr()) };
    kept.store(address, Ordering::Relaxed);
    address
}

/// Looks all of them up, so that no signal handler has to.
pub(crate) fn resolve_all() {
    for &symbol in ALL {
        address(symbol);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_has_a_next_definition_that_is_not_ours() {
        let ours = crate::calls::pread64 as *mut c_void;
        for &symbol in ALL {
            assert!(!address(symbol).is_null(), "{:?}", symbol.name());
            assert_ne!(address(symbol), ours);
        }
    }
}
