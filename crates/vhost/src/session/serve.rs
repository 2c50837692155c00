//! A session over its socket: one message after the other, until the front end leaves.

use std::os::fd::AsFd;

use super::{Answer, QueueHost, Refused, Session};
use crate::protocol::{
    Connection, InflightArea, MessageError, Received, Request, TransportError, VringState,
};

/// What ends a session before the front end does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// The connection failed, or what came over it cannot be read.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// No message that is known here.
    #[error("the front end sent {0}")]
    Message(MessageError),
    /// A request that cannot be done, and that the front end takes for done.
    #[error("{request} was refused")]
    Refused {
        /// Which.
        request: Request,
        /// Why.
        #[source]
        source: Refused,
    },
}

/// How a session went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ended {
    /// Messages that came.
    pub messages: u64,
    /// Requests that were refused without ending the session.
    pub refused: u64,
    /// The first of them.
    pub first_refused: Option<SessionError>,
    /// What ended the session, if the front end did not leave by itself.
    pub error: Option<SessionError>,
}

/// Answers a front end until it leaves, or must.
///
/// What a front end cannot have done is told to it, if it wants to know; otherwise it would count
/// on it, and the session ends.
pub fn serve<H: QueueHost>(connection: &mut Connection, session: &mut Session<H>) -> Ended {
    let mut ended = Ended::default();
    loop {
        let received = match connection.receive() {
            Ok(Some(received)) => received,
            Ok(None) => return ended,
            Err(error) => return Ended { error: Some(error.into()), ..ended },
        };
        ended.messages += 1;
        let number = received.header.request;
        let acknowledge = received.header.needs_reply();
        let outcome = step(session, received);
        let acknowledge = acknowledge && session.acknowledges();
        let sent = match outcome {
            Ok(answer) => reply(connection, number, answer, acknowledge),
            Err(error) => {
                let told = acknowledge && !error.wants_answer();
                if !told && !error.is_harmless() {
                    return Ended { error: Some(error), ..ended };
                }
                ended.refused += 1;
                ended.first_refused.get_or_insert(error);
                if told { reply(connection, number, Answer::U64(1), false) } else { Ok(()) }
            }
        };
        if let Err(error) = sent {
            // It left before it read the answer: also a way to leave.
            let error = Some(SessionError::Transport(error)).filter(|error| !error.is_departure());
            return Ended { error, ..ended };
        }
    }
}

fn step<H: QueueHost>(
    session: &mut Session<H>,
    received: Received,
) -> Result<Answer, SessionError> {
    let message = received.message.map_err(SessionError::Message)?;
    let request = message.request();
    let refused = |source| SessionError::Refused { request, source };
    session.handle(message, received.fds).map_err(refused)
}

impl SessionError {
    /// Whether the front end waits for something else than an acknowledgement.
    const fn wants_answer(&self) -> bool {
        match self {
            Self::Refused { request, .. } => matches!(
                request,
                Request::GetVringBase | Request::GetInflightFd | Request::SetLogBase
            ),
            Self::Message(MessageError::Unknown(_)) => false,
            Self::Message(_) | Self::Transport(_) => true,
        }
    }

    /// Whether the front end may go on although it was not told. A guest's driver can write to the
    /// configuration space what it likes; front ends pass it on unseen.
    const fn is_harmless(&self) -> bool {
        matches!(self, Self::Refused { request: Request::SetConfig, .. })
    }

    const fn is_departure(&self) -> bool {
        use rustix::io::Errno;
        let Self::Transport(TransportError::Socket(errno)) = self else { return false };
        matches!(*errno, Errno::PIPE | Errno::CONNRESET)
    }
}

fn reply(
    connection: &Connection,
    request: u32,
    answer: Answer,
    acknowledge: bool,
) -> Result<(), TransportError> {
    match answer {
        Answer::Done if !acknowledge => Ok(()),
        Answer::Done => connection.reply(request, &0_u64.to_ne_bytes(), None),
        Answer::U64(number) => connection.reply(request, &number.to_ne_bytes(), None),
        Answer::Vring(VringState { index, num }) => {
            let body = [index.to_ne_bytes(), num.to_ne_bytes()].concat();
            connection.reply(request, &body, None)
        }
        Answer::Config { offset, flags, data } => {
            let header = [offset, data.len() as u32, flags].map(u32::to_ne_bytes).concat();
            connection.reply(request, &[header, data].concat(), None)
        }
        Answer::Inflight(area, fd) => {
            let InflightArea { size, offset, queues, queue_size, padded } = area;
            let mut body = [size, offset].map(u64::to_ne_bytes).concat();
            body.extend([queues, queue_size].map(u16::to_ne_bytes).concat());
            if padded {
                body.extend([0; 4]);
            }
            connection.reply(request, &body, Some(fd.as_fd()))
        }
    }
}
