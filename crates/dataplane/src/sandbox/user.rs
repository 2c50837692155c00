//! The user that the service runs as.

use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;

use rustix::io::Errno;

/// Room for a line of `/etc/passwd` or `/etc/group`.
const LINE: usize = 64 << 10;

/// Why there is no such user.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UserError {
    /// Nobody has this name.
    #[error("there is no user {0:?}: make one (useradd --system --shell /usr/sbin/nologin {0})")]
    NoUser(String),
    /// No group has this name.
    #[error("there is no group {0:?}: make one (groupadd --system {0})")]
    NoGroup(String),
    /// It would give up nothing.
    #[error("user {0:?} is root")]
    Root(String),
    /// The list of users cannot be read.
    #[error("cannot look up {name:?}")]
    Lookup {
        /// Whom.
        name: String,
        /// Why.
        source: Errno,
    },
}

/// A user and group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    name: String,
    uid: u32,
    gid: u32,
}

impl Identity {
    /// The user of this name, and the group of that one; without, the user's own.
    ///
    /// # Errors
    /// [`UserError`].
    pub fn find(user: &str, group: Option<&str>) -> Result<Self, UserError> {
        let failed = |name: &str, source| UserError::Lookup { name: name.to_owned(), source };
        let (uid, own) = find_user(user)
            .map_err(|source| failed(user, source))?
            .ok_or_else(|| UserError::NoUser(user.to_owned()))?;
        if uid == 0 {
            return Err(UserError::Root(user.to_owned()));
        }
        let gid = match group {
            None => own,
            Some(group) => find_group(group)
                .map_err(|source| failed(group, source))?
                .ok_or_else(|| UserError::NoGroup(group.to_owned()))?,
        };
        Ok(Self { name: user.to_owned(), uid, gid })
    }

    /// The user's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The user.
    #[must_use]
    pub const fn uid(&self) -> u32 {
        self.uid
    }

    /// The group.
    #[must_use]
    pub const fn gid(&self) -> u32 {
        self.gid
    }
}

/// What the C library answers for a name; a name that holds a NUL is nobody's.
fn look_up<E: Copy, T>(
    name: &str,
    call: impl Fn(&CStr, *mut E, &mut [libc::c_char], &mut *mut E) -> i32,
    read: impl Fn(&E) -> T,
) -> Result<Option<T>, Errno> {
    let Ok(name) = CString::new(name) else { return Ok(None) };
    let mut line = vec![0; LINE];
    let mut entry = MaybeUninit::<E>::uninit();
    let mut found = std::ptr::null_mut();
    match call(&name, entry.as_mut_ptr(), &mut line, &mut found) {
        // Some sources of names answer so when they have none.
        0 | libc::ENOENT | libc::ESRCH if found.is_null() => Ok(None),
        // SAFETY: the call says that it has filled `entry`.
        0 => Ok(Some(read(unsafe { entry.assume_init_ref() }))),
        error => Err(Errno::from_raw_os_error(error)),
    }
}

fn find_user(name: &str) -> Result<Option<(u32, u32)>, Errno> {
    let call = |name: &CStr, entry, line: &mut [libc::c_char], found: &mut _| {
        // SAFETY: all four outlive the call, and `line` has as many bytes as is said.
        unsafe { libc::getpwnam_r(name.as_ptr(), entry, line.as_mut_ptr(), line.len(), found) }
    };
    look_up(name, call, |entry: &libc::passwd| (entry.pw_uid, entry.pw_gid))
}

fn find_group(name: &str) -> Result<Option<u32>, Errno> {
    let call = |name: &CStr, entry, line: &mut [libc::c_char], found: &mut _| {
        // SAFETY: as in `find_user`.
        unsafe { libc::getgrnam_r(name.as_ptr(), entry, line.as_mut_ptr(), line.len(), found) }
    };
    look_up(name, call, |entry: &libc::group| entry.gr_gid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_who_is_not_there_is_named_with_what_to_do() {
        let error = Identity::find("no-such-user", None).unwrap_err();
        assert!(matches!(&error, UserError::NoUser(name) if name == "no-such-user"));
        assert!(error.to_string().contains("useradd --system"), "{error}");
        assert!(matches!(Identity::find("a\0b", None), Err(UserError::NoUser(_))));
        assert!(matches!(Identity::find("root", None), Err(UserError::Root(_))));
    }

    #[test]
    fn group_is_the_users_own_unless_one_is_named() {
        let Ok(own) = Identity::find("nobody", None) else {
            return rtvirtio_engine::testing::skipped("there is no user nobody");
        };
        let other = Identity::find("nobody", Some("root")).unwrap();
        assert_eq!((other.uid(), other.gid()), (own.uid(), 0));
        assert!(own.uid() != 0 && own.gid() != 0);
        let none = Identity::find("nobody", Some("no-such-group"));
        assert!(matches!(none, Err(UserError::NoGroup(_))));
    }
}
