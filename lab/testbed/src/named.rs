//! Enums whose variants have names: the same on the command line, in files and in tables.

/// Makes an enum of `Variant = "name"`, with all its variants in order and their names.
#[macro_export]
macro_rules! named {
    ($(#[$meta:meta])* $vis:vis enum $enum:ident {
        $($(#[$of:meta])* $variant:ident = $name:literal,)+
    }) => {
        $(#[$meta])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ::serde::Serialize, ::serde::Deserialize,
        )]
        $vis enum $enum {
            $($(#[$of])* #[serde(rename = $name)] $variant,)+
        }

        impl $enum {
            /// All, in the order of tables.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            /// As it is written.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }

        impl std::fmt::Display for $enum {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl std::str::FromStr for $enum {
            type Err = ::serde_json::Error;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                ::serde_json::from_value(text.into())
            }
        }
    };
}
